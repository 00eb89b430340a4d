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

    /// First day of the calendar year.
    pub const fn year_start(self) -> BusinessDay {
        // Years counted from March, so that a leap day is the last day of its year. 0000-03-01 is
        // 719,468 days before 1970-01-01.
        let days = self.0 + 719_468;
        let era = days.div_euclid(DAYS_OF_400_YEARS);
        let day_of_era = days.rem_euclid(DAYS_OF_400_YEARS);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - days_before(year_of_era);
        // 306 days after March 1 is January 1 of the next calendar year.
        let from_march = era * DAYS_OF_400_YEARS + days_before(year_of_era);
        let january = match day_of_year >= 306 {
            true => from_march + 306,
            false => from_march + 306 - days_of(era * 400 + year_of_era),
        };
        BusinessDay(january - 719_468)
    }
}

/// Days of 400 years.
const DAYS_OF_400_YEARS: i64 = 146_097;

/// Days before the year of an era, counted from March.
const fn days_before(year_of_era: i64) -> i64 {
    365 * year_of_era + year_of_era / 4 - year_of_era / 100
}

/// Days of a calendar year.
const fn days_of(year: i64) -> i64 {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    365 + is_leap as i64
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

    // rows: R340
    #[test]
    fn f35_the_year_begins_on_january_1() {
        // Day numbers of January 1 of 1969 to 1971, 2000, 2001, 2024 and 2025.
        for (first, next) in [(-365, 0), (0, 365), (10_957, 11_323), (19_723, 20_089)] {
            for day in [
                first,
                first + 1,
                first + 58,
                first + 59,
                first + 60,
                next - 1,
            ] {
                let start = BusinessDay(day).year_start();
                assert_eq!(start, BusinessDay(first), "{day}");
            }
            assert_eq!(BusinessDay(next).year_start(), BusinessDay(next));
        }
    }
}
