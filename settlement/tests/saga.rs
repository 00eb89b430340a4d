//! Sagas against a model of ledger and chain: each step is lost once after its effect and repeated.

use settlement::saga::{Saga, State, Step, StepResult, UnexpectedResult};

/// Ledger and chain, idempotent as in their contracts.
struct World {
    posted: u32,
    /// On-chain moves per trade.
    moved: Vec<u32>,
    batches: Vec<(u32, Vec<u32>)>,
    finalized: Vec<Option<String>>,
    reversed: Vec<u32>,
    /// Trades that the contract skips, per attempt.
    left_out: [Vec<u32>; 2],
    /// Attempts with more trades fail as a whole.
    trades_max: usize,
}

impl World {
    fn new(trades: usize) -> Self {
        Self {
            posted: 0,
            moved: vec![0; trades],
            batches: Vec::new(),
            finalized: vec![None; trades],
            reversed: Vec::new(),
            left_out: Default::default(),
            trades_max: trades,
        }
    }

    /// Those of these trades that the contract skips in an attempt.
    fn skipped(&self, attempt: u32, trades: &[u32]) -> Vec<u32> {
        let of_attempt = self.left_out.get(attempt as usize - 1);
        let is_skipped = |trade: &&u32| of_attempt.is_some_and(|skipped| skipped.contains(trade));
        trades.iter().filter(is_skipped).copied().collect()
    }

    fn execute(&mut self, step: &Step) -> StepResult {
        match step {
            Step::Post => {
                self.posted = 1;
                StepResult::Posted
            }
            Step::Submit { attempt, trades } => {
                assert_eq!(self.posted, 1, "no chain step before the ledger");
                if self.batches.iter().all(|(known, _)| known != attempt) {
                    self.batches.push((*attempt, trades.clone()));
                    let skipped = self.skipped(*attempt, trades);
                    if trades.len() <= self.trades_max {
                        for trade in trades.iter().filter(|t| !skipped.contains(t)) {
                            self.moved[*trade as usize] += 1;
                        }
                    }
                }
                StepResult::Submitted
            }
            Step::Await { attempt } => {
                let mut batches = self.batches.iter();
                let (_, trades) = batches.find(|(id, _)| id == attempt).expect("submitted");
                if trades.len() > self.trades_max {
                    return StepResult::Failed;
                }
                StepResult::Included {
                    tx_hash: format!("0x{attempt}"),
                    failed: self.skipped(*attempt, trades),
                }
            }
            Step::Finalize { trades, tx_hash } => {
                for trade in trades {
                    self.finalized[*trade as usize] = Some(tx_hash.clone());
                }
                StepResult::Finalized
            }
            Step::Bust { trades } => {
                self.reversed = trades.clone();
                StepResult::Busted
            }
            Step::Done => unreachable!(),
        }
    }
}

/// Runs a saga to its end. At step `crash_at` the process dies after the effect and before the
/// state is stored.
fn run(mut world: World, trades: u32, crash_at: Option<usize>) -> (World, Saga) {
    let mut saga = Saga::new(trades);
    for n in 0.. {
        let step = saga.next();
        if step == Step::Done {
            break;
        }
        let answer = world.execute(&step);
        // Serialized as in the store.
        let mut kept: Saga = serde_json::from_str(&serde_json::to_string(&saga).unwrap()).unwrap();
        if crash_at == Some(n) {
            assert_eq!(kept.next(), step);
            saga = kept;
            continue;
        }
        kept.handle_result(answer).unwrap();
        saga = kept;
        assert!(n < 60);
    }
    (world, saga)
}

// rows: R186 R189 R184
#[test]
fn r186_each_step_may_be_lost_and_repeated() {
    for crash_at in (0..8).map(Some).chain([None]) {
        let (world, saga) = run(World::new(3), 3, crash_at);
        assert_eq!(saga.state, State::Final);
        assert_eq!(world.moved, vec![1, 1, 1]);
        assert!(
            world
                .finalized
                .iter()
                .all(|hash| hash.as_deref() == Some("0x1"))
        );
        assert_eq!(world.reversed, Vec::<u32>::new());
    }
}

// rows: R186
#[test]
fn r186_a_skipped_trade_is_retried_then_bust() {
    for crash_at in (0..12).map(Some).chain([None]) {
        let mut world = World::new(4);
        world.left_out = [vec![1, 3], vec![3]];
        let (world, saga) = run(world, 4, crash_at);
        assert_eq!(world.moved, vec![1, 1, 1, 0]);
        assert_eq!(world.finalized[1].as_deref(), Some("0x2"));
        assert_eq!(
            (world.finalized[3].as_ref(), world.reversed),
            (None, vec![3])
        );
        assert_eq!((saga.bust, saga.state), (vec![3], State::Final));
    }
}

// rows: R186
#[test]
fn r186_a_batch_that_fails_as_a_whole_is_settled_in_halves() {
    for crash_at in (0..20).map(Some).chain([None]) {
        let mut world = World::new(5);
        world.trades_max = 2;
        let (world, saga) = run(world, 5, crash_at);
        assert_eq!(world.moved, vec![1; 5]);
        let batches: [(u32, Vec<u32>); 5] = [
            (1, vec![0, 1, 2, 3, 4]),
            (2, vec![0, 1, 2]),
            (3, vec![0, 1]),
            (4, vec![2]),
            (5, vec![3, 4]),
        ];
        assert_eq!(world.batches, batches);
        let hashes = ["0x3", "0x3", "0x4", "0x5", "0x5"].map(|hash| Some(hash.to_owned()));
        assert_eq!(world.finalized, hashes);
        assert_eq!((world.reversed, saga.state), (vec![], State::Final));
    }
}

// rows: R186
#[test]
fn r186_trades_left_out_of_a_part_are_retried_after_all_parts() {
    for crash_at in (0..24).map(Some).chain([None]) {
        let mut world = World::new(4);
        (world.trades_max, world.left_out) = (2, [vec![], vec![1]]);
        let (world, saga) = run(world, 4, crash_at);
        assert_eq!((world.moved, saga.bust.len()), (vec![1; 4], 0));
        let batches: [(u32, Vec<u32>); 4] = [
            (1, vec![0, 1, 2, 3]),
            (2, vec![0, 1]),
            (3, vec![2, 3]),
            (4, vec![1]),
        ];
        assert_eq!(world.batches, batches);
    }
}

// rows: R186
/// The chain service lists failed trades in any order.
#[test]
fn r186_trades_left_out_are_retried_in_the_order_of_execution() {
    let mut saga = Saga::new(3);
    let (tx_hash, failed) = ("0x1".to_owned(), vec![2, 0]);
    for result in [
        StepResult::Posted,
        StepResult::Submitted,
        StepResult::Included { tx_hash, failed },
        StepResult::Finalized,
    ] {
        saga.handle_result(result).unwrap();
    }
    let (attempt, trades) = (2, vec![0, 2]);
    assert_eq!(saga.next(), Step::Submit { attempt, trades });
}

// rows: R186
#[test]
fn r186_a_trade_that_fails_alone_is_retried_then_bust() {
    for crash_at in (0..24).map(Some).chain([None]) {
        let mut world = World::new(2);
        world.trades_max = 0;
        let (world, saga) = run(world, 2, crash_at);
        assert_eq!((world.moved, world.reversed), (vec![0, 0], vec![0, 1]));
        assert_eq!((saga.bust, saga.state), (vec![0, 1], State::Final));
        // The batch and each half, twice.
        assert_eq!(world.batches.len(), 6);

        let mut world = World::new(2);
        world.left_out = [vec![0, 1], vec![]];
        let (world, saga) = run(world, 2, crash_at);
        assert_eq!((world.moved, saga.bust.len()), (vec![1, 1], 0));
    }
}

// rows: R186
#[test]
fn r186_a_trade_withdrawn_from_a_part_is_bust_after_the_other_parts() {
    let mut saga = Saga::new(2);
    for result in [
        StepResult::Posted,
        StepResult::Submitted,
        StepResult::Failed,
    ] {
        saga.handle_result(result).unwrap();
    }
    assert_eq!(saga.undecided().copied().collect::<Vec<_>>(), [0, 1]);
    withdrawn(&mut saga, &[0]).unwrap();
    let (attempt, trades) = (3, vec![1]);
    assert_eq!(saga.next(), Step::Submit { attempt, trades });
    let mut world = World::new(2);
    world.posted = 1;
    let saga = finished(saga, &mut world);
    assert_eq!((world.moved, world.reversed), (vec![0, 1], vec![0]));
    assert_eq!((saga.bust, saga.state), (vec![0], State::Final));
}

fn withdrawn(saga: &mut Saga, trades: &[u32]) -> Result<(), UnexpectedResult> {
    let trades = trades.to_vec();
    saga.handle_result(StepResult::Withdrawn { trades })
}

/// Executes a saga to its end; each state is stored and read again.
fn finished(mut saga: Saga, world: &mut World) -> Saga {
    for _ in 0..30 {
        let step = saga.next();
        if step == Step::Done {
            return saga;
        }
        let answer = world.execute(&step);
        saga = serde_json::from_str(&serde_json::to_string(&saga).unwrap()).unwrap();
        saga.handle_result(answer).unwrap();
    }
    panic!("{saga:?}");
}

// rows: R186
#[test]
fn r186_withdrawn_trades_are_bust_at_the_end_of_their_batch() {
    let mut saga = Saga::new(3);
    saga.handle_result(StepResult::Posted).unwrap();
    let mut alone = saga.clone();
    // The others go on, and the withdrawn trade is bust with those that fail.
    withdrawn(&mut saga, &[1]).unwrap();
    let mut world = World::new(3);
    world.posted = 1;
    world.left_out = [vec![2], vec![2]];
    let saga = finished(saga, &mut world);
    assert_eq!((world.moved, world.reversed), (vec![1, 0, 0], vec![1, 2]));
    assert_eq!(world.finalized[0].as_deref(), Some("0x1"));
    assert_eq!((saga.bust, saga.state), (vec![1, 2], State::Final));

    // Without the others nothing is submitted.
    withdrawn(&mut alone, &[0, 1, 2]).unwrap();
    let trades = vec![0, 1, 2];
    assert_eq!(alone.next(), Step::Bust { trades });
    alone.handle_result(StepResult::Busted).unwrap();
    assert_eq!(alone.state, State::Final);
    // With a final trade and no failed one the withdrawn trade is bust too.
    let mut saga = Saga::new(2);
    saga.handle_result(StepResult::Posted).unwrap();
    withdrawn(&mut saga, &[0]).unwrap();
    saga.handle_result(StepResult::Submitted).unwrap();
    let failed = Vec::new();
    let tx_hash = "0x1".to_owned();
    let included = StepResult::Included { tx_hash, failed };
    saga.handle_result(included).unwrap();
    assert!(matches!(saga.next(), Step::Finalize { trades, .. } if trades == [1]));
    saga.handle_result(StepResult::Finalized).unwrap();
    assert_eq!(saga.next(), Step::Bust { trades: vec![0] });
    saga.handle_result(StepResult::Busted).unwrap();
    assert_eq!(saga.state, State::Final);
}

// rows: R186
#[test]
fn r186_a_trade_withdrawn_before_its_posting_is_bust_and_the_others_are_settled() {
    let mut saga = Saga::new(3);
    withdrawn(&mut saga, &[1]).unwrap();
    assert_eq!(
        saga.next(),
        Step::Post,
        "the batch is posted without the trade"
    );
    let mut alone = saga.clone();
    let mut world = World::new(3);
    world.left_out = [vec![2], vec![2]];
    let saga = finished(saga, &mut world);
    assert_eq!((world.moved, world.reversed), (vec![1, 0, 0], vec![1, 2]));
    assert_eq!((saga.bust, saga.state), (vec![1, 2], State::Final));
    assert_eq!(
        saga.unposted,
        [1],
        "only the other one has operations to reverse"
    );

    // Without trades the batch is still posted: it has hold steps and moves the position.
    withdrawn(&mut alone, &[0, 2]).unwrap();
    assert_eq!(alone.next(), Step::Post);
    alone.handle_result(StepResult::Posted).unwrap();
    let trades = vec![0, 1, 2];
    assert_eq!(alone.next(), Step::Bust { trades });
    alone.handle_result(StepResult::Busted).unwrap();
    assert_eq!(alone.state, State::Final);
    assert_eq!(alone.unposted.len(), 3);
}

// rows: R186
/// The stored form of a batch without withdrawn trades is that of older releases.
#[test]
fn a_saga_of_an_older_release_is_read() {
    let stored = serde_json::to_string(&Saga::new(1)).unwrap();
    for field in ["withdrawn", "unposted", "parts", "left_out", "is_retry"] {
        assert!(!stored.contains(field), "{stored}");
    }
    assert_eq!(serde_json::from_str::<Saga>(&stored).unwrap(), Saga::new(1));
}

#[test]
fn a_batch_without_trades_ends_in_the_ledger() {
    let (_, saga) = run(World::new(0), 0, None);
    assert_eq!(saga.state, State::Final);
}

#[test]
fn an_unexpected_result_changes_nothing() {
    let mut saga = Saga::new(1);
    let before = saga.clone();
    assert!(saga.handle_result(StepResult::Finalized).is_err());
    assert!(saga.handle_result(StepResult::Submitted).is_err());
    assert_eq!(saga, before);
}
