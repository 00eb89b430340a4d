//! Bounds of times (D49).

use std::ops::Range;

use prost_types::Timestamp;

/// Valid times of a request, in seconds since 1970: the years 2000 to 2100.
pub const SECONDS: Range<i64> = 946_684_800..4_133_980_800;

/// Times with a JSON form (RFC 3339), in seconds since 1970: the years 1 to 9999.
pub const JSON_SECONDS: Range<i64> = -62_135_596_800..253_402_300_800;

const NANOS: Range<i32> = 0..1_000_000_000;

/// Clamps a time to the range with a JSON form.
pub fn clamped(time: Timestamp) -> Timestamp {
    if time.seconds < JSON_SECONDS.start {
        return Timestamp {
            seconds: JSON_SECONDS.start,
            nanos: 0,
        };
    }
    if time.seconds >= JSON_SECONDS.end {
        return Timestamp {
            seconds: JSON_SECONDS.end - 1,
            nanos: NANOS.end - 1,
        };
    }
    Timestamp {
        nanos: time.nanos.clamp(NANOS.start, NANOS.end - 1),
        ..time
    }
}

/// Why a request may not contain this time; `None` if it may.
pub(crate) fn problem(time: &Timestamp) -> Option<&'static str> {
    if !NANOS.contains(&time.nanos) {
        return Some("must have 0 to 999999999 nanoseconds");
    }
    (!SECONDS.contains(&time.seconds)).then_some("must be a time of the years 2000 to 2100")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_without_a_json_form_is_moved_to_the_nearest_that_has_one() {
        for (seconds, text) in [
            (i64::MIN, "0001-01-01T00:00:00Z"),
            (i64::MAX, "9999-12-31T23:59:59.999999999Z"),
            (0, "1970-01-01T00:00:00Z"),
        ] {
            assert_eq!(clamped(Timestamp { seconds, nanos: 0 }).to_string(), text);
        }
        let nanos = clamped(Timestamp {
            seconds: 1,
            nanos: -5,
        })
        .nanos;
        assert_eq!(nanos, 0);
    }
}
