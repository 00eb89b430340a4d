//! The business day: midnight to midnight in Europe/Moscow (UTC+3, no summer time since 2014).

const MOSCOW_OFFSET_US: i64 = 3 * 3_600 * 1_000_000;
const DAY_US: i64 = 86_400 * 1_000_000;

/// A calendar day in Moscow, counted from 1970-01-01.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BusinessDay(i64);

impl BusinessDay {
    /// The day an instant (microseconds since the epoch) belongs to.
    pub const fn of(time_us: i64) -> BusinessDay {
        BusinessDay((time_us.saturating_add(MOSCOW_OFFSET_US)).div_euclid(DAY_US))
    }

    pub const fn from_number(number: i64) -> BusinessDay {
        BusinessDay(number)
    }

    pub const fn number(self) -> i64 {
        self.0
    }

    /// First instant of the day.
    pub const fn start_us(self) -> i64 {
        self.0
            .saturating_mul(DAY_US)
            .saturating_sub(MOSCOW_OFFSET_US)
    }

    /// First instant of the next day: the cut-off.
    pub const fn end_us(self) -> i64 {
        self.next().start_us()
    }

    pub const fn next(self) -> BusinessDay {
        BusinessDay(self.0 + 1)
    }

    pub const fn previous(self) -> BusinessDay {
        BusinessDay(self.0 - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_day_changes_at_moscow_midnight() {
        // 2026-11-20T20:59:59.999999Z and one microsecond later.
        let last = 1_795_208_399_999_999;
        let day = BusinessDay::of(last);
        assert_eq!(BusinessDay::of(last + 1), day.next());
        assert_eq!(day.end_us(), last + 1);
        assert_eq!(BusinessDay::of(day.start_us()), day);
        assert_eq!(day.next().previous(), day);
        assert!(BusinessDay::of(-1) <= BusinessDay::of(0));
    }
}
