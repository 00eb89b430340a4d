use super::*;

const START_NS: u64 = 1_800_000_000_000_000_000;
const SECOND: i64 = 1_000_000_000;
const DAY: i64 = 86_400 * SECOND;

/// A machine with a real-time clock set by the test.
#[derive(Clone, Copy)]
struct Machine {
    monotonic_ns: u64,
    /// Error of real time against true time.
    wrong_ns: i64,
    is_synchronised: bool,
}

impl Machine {
    fn new() -> Self {
        Self {
            monotonic_ns: 1_000,
            wrong_ns: 0,
            is_synchronised: true,
        }
    }

    fn truth_ns(&self) -> u64 {
        START_NS + self.monotonic_ns
    }

    fn read(&self) -> Reading {
        Reading {
            monotonic_ns: self.monotonic_ns,
            realtime_ns: self.truth_ns().saturating_add_signed(self.wrong_ns),
            is_synchronised: self.is_synchronised,
        }
    }

    fn pass(&mut self, ns: i64) {
        self.monotonic_ns += ns.unsigned_abs();
    }

    /// Error of platform time against true time.
    fn error_ns(&self, clock: &Discipline) -> i64 {
        difference(clock.segment().at(self.monotonic_ns), self.truth_ns())
    }
}

fn started() -> (Machine, Discipline) {
    let machine = Machine::new();
    (machine, Discipline::new(machine.read()))
}

#[test]
fn a_step_is_slewed_followed_or_suspect_by_its_size() {
    let slewed = |ns| (State::Normal { slew_ns: ns }, 0);
    let followed = |ns| (State::Normal { slew_ns: 0 }, ns);
    let suspect = |ns| (State::Suspect { offset_ns: ns }, 0);
    for (step_ns, is_synchronised, (state, error_ns)) in [
        (0, true, slewed(0)),
        (SLEW_MAX_NS, true, slewed(SLEW_MAX_NS)),
        (SLEW_MAX_NS + 1, true, followed(SLEW_MAX_NS + 1)),
        (SLEW_MAX_NS + 1, false, slewed(SLEW_MAX_NS + 1)),
        (STEP_MAX_NS, true, followed(STEP_MAX_NS)),
        (STEP_MAX_NS, false, slewed(STEP_MAX_NS)),
        (STEP_MAX_NS + 1, true, suspect(STEP_MAX_NS + 1)),
        (STEP_MAX_NS + 1, false, suspect(STEP_MAX_NS + 1)),
        (-SLEW_MAX_NS, true, slewed(-SLEW_MAX_NS)),
        (-STEP_MAX_NS, true, slewed(-STEP_MAX_NS)),
        (-STEP_MAX_NS - 1, true, suspect(-STEP_MAX_NS - 1)),
        (DAY, true, suspect(DAY)),
        (-DAY, false, suspect(-DAY)),
    ] {
        let (mut machine, mut clock) = started();
        machine.wrong_ns = step_ns;
        machine.is_synchronised = is_synchronised;
        assert_eq!(clock.observe(machine.read()), state, "{step_ns}");
        assert_eq!(machine.error_ns(&clock), error_ns, "{step_ns}");
    }
}

#[test]
fn a_slew_moves_time_by_500_ppm_and_ends_at_real_time() {
    for (step_ns, after_a_second_ns) in [(100_000_000, 500_000), (-100_000_000, -500_000)] {
        let (mut machine, mut clock) = started();
        machine.wrong_ns = step_ns;
        clock.observe(machine.read());
        machine.pass(SECOND);
        assert_eq!(machine.error_ns(&clock), after_a_second_ns);
        machine.pass(199 * SECOND);
        assert_eq!(machine.error_ns(&clock), step_ns);
        machine.pass(DAY);
        assert_eq!(machine.error_ns(&clock), step_ns, "the slew has ended");
    }
}

#[test]
fn a_corrected_clock_is_trusted_again() {
    for step_ns in [DAY, -DAY] {
        let (mut machine, mut clock) = started();
        machine.wrong_ns = step_ns;
        for _ in 0..10 {
            assert_eq!(clock.observe(machine.read()).suspect_ns(), Some(step_ns));
            machine.pass(SECOND);
        }
        machine.wrong_ns = -20_000_000;
        let state = clock.observe(machine.read());
        assert_eq!(
            state,
            State::Normal {
                slew_ns: -20_000_000
            }
        );
        assert_eq!(machine.error_ns(&clock), 0);
    }
}

#[test]
fn a_confirmation_accepts_real_time_and_needs_a_suspect_clock() {
    for step_ns in [DAY, -DAY] {
        let (mut machine, mut clock) = started();
        assert_eq!(clock.confirm(machine.read()), None);
        machine.wrong_ns = step_ns;
        clock.observe(machine.read());
        let confirmed = clock.confirm(machine.read()).expect("suspect");
        assert_eq!(difference(confirmed.to_ns, confirmed.from_ns), step_ns);
        assert_eq!(machine.error_ns(&clock), step_ns);
        assert_eq!(clock.confirm(machine.read()), None);
        machine.pass(SECOND);
        assert_eq!(clock.observe(machine.read()), State::Normal { slew_ns: 0 });
    }
}

#[test]
fn at_start_real_time_before_a_stored_time_is_suspect() {
    let stored = |last_ns| Stored {
        last_ns,
        ..Stored::default()
    };
    for (stored_ahead_ns, is_suspect) in [
        (-365 * DAY, false),
        (-1, false),
        (STEP_MAX_NS, false),
        (STEP_MAX_NS + 1, true),
        (DAY, true),
    ] {
        let (mut machine, mut clock) = started();
        let last_ns = machine.truth_ns().saturating_add_signed(stored_ahead_ns);
        let state = clock.check_stored(stored(last_ns), machine.read());
        assert_eq!(
            state.suspect_ns().is_some(),
            is_suspect,
            "{stored_ahead_ns}"
        );
        assert_eq!(
            machine.error_ns(&clock),
            0,
            "the store does not change time"
        );
        if is_suspect {
            assert_eq!(state.suspect_ns(), Some(-stored_ahead_ns));
            // The clock was wrong at the start. It is now set to a time after the stored one.
            machine.wrong_ns = stored_ahead_ns + 3 * DAY;
            assert_eq!(clock.observe(machine.read()), State::Normal { slew_ns: 0 });
            assert_eq!(machine.error_ns(&clock), machine.wrong_ns);
        }
    }
}

#[test]
fn a_confirmed_time_is_not_suspect_at_the_next_start() {
    let (machine, mut clock) = started();
    let ahead = Stored {
        last_ns: machine.truth_ns().saturating_add_signed(DAY),
        ..Stored::default()
    };
    assert!(
        clock
            .check_stored(ahead, machine.read())
            .suspect_ns()
            .is_some()
    );
    let confirmed_ns = clock.latest_ns(machine.monotonic_ns);
    assert!(clock.confirm(machine.read()).is_some());
    assert_eq!(clock.observe(machine.read()).suspect_ns(), None);

    let (machine, mut clock) = started();
    assert!(
        clock
            .check_stored(ahead, machine.read())
            .suspect_ns()
            .is_some()
    );
    let journal = Stored {
        confirmed_ns,
        ..ahead
    };
    assert_eq!(
        clock.check_stored(journal, machine.read()).suspect_ns(),
        None
    );
    let later = Stored {
        last_ns: ahead.last_ns.saturating_add_signed(STEP_MAX_NS + 1),
        ..Stored::default()
    };
    let state = clock.check_stored(later, machine.read());
    assert!(
        state.suspect_ns().is_some(),
        "a later time of another store is not confirmed"
    );
}

#[test]
fn a_restart_does_not_confirm_a_forward_step() {
    let carried = |last_ns| Stored {
        last_ns,
        suspect_ns: DAY,
        ..Stored::default()
    };
    let (mut machine, _) = started();
    let last_ns = machine.truth_ns();
    machine.pass(10 * SECOND);
    machine.wrong_ns = DAY;
    let mut clock = Discipline::new(machine.read());
    let state = clock.check_stored(carried(last_ns), machine.read());
    assert_eq!(state.suspect_ns(), Some(DAY + 10 * SECOND));
    assert_eq!(clock.segment().at(machine.monotonic_ns), last_ns);
    machine.pass(SECOND);
    assert!(clock.observe(machine.read()).suspect_ns().is_some());
    machine.wrong_ns = 0;
    assert_eq!(clock.observe(machine.read()), State::Normal { slew_ns: 0 });
    assert_eq!(machine.error_ns(&clock), 0);

    // The clock was corrected before the start. It is ahead of the store only by the downtime.
    let (mut machine, mut clock) = started();
    let last_ns = machine.truth_ns();
    machine.pass(3_600 * SECOND);
    let state = clock.check_stored(carried(last_ns), machine.read());
    assert_eq!(state.suspect_ns(), None);
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % end
    }

    fn step_ns(&mut self) -> i64 {
        let most = [
            1_000_000,
            SLEW_MAX_NS,
            STEP_MAX_NS,
            2 * STEP_MAX_NS,
            40 * DAY,
        ];
        let most = most[self.below(5) as usize];
        self.below(2 * most.unsigned_abs()).cast_signed() - most
    }
}

#[test]
fn time_grows_evenly_except_for_allowed_steps() {
    for seed in 0..200 {
        let (mut random, (mut machine, mut clock)) = (Random(seed), started());
        for _ in 0..300 {
            match random.below(8) {
                0 => machine.wrong_ns = random.step_ns(),
                1 => machine.wrong_ns = 0,
                2 => machine.is_synchronised = random.below(2) == 0,
                _ => {}
            }
            let before_ns = clock.segment().at(machine.monotonic_ns);
            let elapsed_ns = random.below(3_000_000_000);
            machine.monotonic_ns += elapsed_ns;
            let after_ns = clock.segment().at(machine.monotonic_ns);
            let strayed_ns = difference(after_ns, before_ns + elapsed_ns);
            assert!(after_ns >= before_ns, "seed {seed}");
            let most_ns = elapsed_ns / SLEW_DIVISOR + 1;
            assert!(
                strayed_ns.unsigned_abs() <= most_ns,
                "seed {seed}: {strayed_ns}"
            );

            let state = clock.observe(machine.read());
            let stepped_ns = difference(clock.segment().at(machine.monotonic_ns), after_ns);
            let is_followed = (SLEW_MAX_NS..=STEP_MAX_NS).contains(&stepped_ns);
            let is_allowed = stepped_ns == 0 || (is_followed && machine.is_synchronised);
            assert!(is_allowed, "seed {seed}: {stepped_ns}");
            let off_ns = difference(machine.read().realtime_ns, after_ns);
            let is_large = off_ns.unsigned_abs() > STEP_MAX_NS.unsigned_abs();
            assert_eq!(state.suspect_ns().is_some(), is_large, "seed {seed}");
            let reported_ns = state.suspect_ns().unwrap_or(off_ns);
            assert!(
                reported_ns.abs_diff(off_ns) <= STEP_MAX_NS.unsigned_abs(),
                "seed {seed}"
            );
        }
        machine.wrong_ns = machine.error_ns(&clock);
        let state = clock.observe(machine.read());
        assert_eq!(state, State::Normal { slew_ns: 0 }, "real time is correct");
    }
}
