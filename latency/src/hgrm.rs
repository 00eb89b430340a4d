//! Percentile distribution of a histogram in the `.hgrm` text format of HdrHistogram's tools.

use std::fmt::Write;

use hdrhistogram::Histogram;

/// Rows per halving of the distance to 100 % (`iter_quantiles`).
const ROWS_PER_HALF: u32 = 5;

/// Formats the distribution. `scale` is histogram units per file unit: 1000 for ns shown as us.
pub fn text(times: &Histogram<u64>, scale: f64) -> String {
    let scaled = |value: u64| value as f64 / scale;
    let mut out = format!(
        "{:>12} {:>14} {:>10} {:>14}\n\n",
        "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
    );
    let mut put = |line: std::fmt::Arguments| {
        out.write_fmt(line)
            .expect("writing to a String cannot fail");
        out.push('\n');
    };
    let mut count = 0;
    for step in times.iter_quantiles(ROWS_PER_HALF) {
        count += step.count_since_last_iteration();
        let (value, quantile) = (
            scaled(step.value_iterated_to()),
            step.quantile_iterated_to(),
        );
        if quantile < 1.0 {
            let inverse = 1.0 / (1.0 - quantile);
            put(format_args!(
                "{value:>12.3} {quantile:>14.12} {count:>10} {inverse:>14.2}"
            ));
        } else {
            put(format_args!("{value:>12.3} {quantile:>14.12} {count:>10}"));
        }
    }
    let (mean, deviation) = (times.mean() / scale, times.stdev() / scale);
    put(format_args!(
        "#[Mean    = {mean:>12.3}, StdDeviation   = {deviation:>12.3}]"
    ));
    put(format_args!(
        "#[Max     = {:>12.3}, Total count    = {:>12}]",
        scaled(times.max()),
        times.len()
    ));
    // Every bucket but the first adds half of its sub-buckets to the distinct values.
    let sub_buckets = 2 * times.distinct_values() / (usize::from(times.buckets()) + 1);
    put(format_args!(
        "#[Buckets = {:>12}, SubBuckets     = {sub_buckets:>12}]",
        times.buckets()
    ));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_grows_to_all_values() {
        let mut times = Histogram::<u64>::new(3).unwrap();
        for value in 1..=10_000u64 {
            times.record(value * 1_000).unwrap();
        }
        let text = text(&times, 1_000.0);
        let mut last = (0.0, 0.0, 0);
        let rows = text.lines().skip(2).filter(|line| !line.starts_with('#'));
        for row in rows {
            let words: Vec<&str> = row.split_whitespace().collect();
            let next: (f64, f64, u64) = (
                words[0].parse().unwrap(),
                words[1].parse().unwrap(),
                words[2].parse().unwrap(),
            );
            assert!(next.0 >= last.0 && next.1 >= last.1 && next.2 >= last.2);
            last = next;
        }
        assert!((last.0 - 10_000.0).abs() < 10.0, "{last:?}");
        assert_eq!((last.1, last.2), (1.0, 10_000));
        assert!(text.contains("Total count    =        10000]"), "{text}");
        assert!(text.contains("SubBuckets     =         2048]"), "{text}");
    }

    #[test]
    fn an_empty_distribution_has_its_frame() {
        let times = Histogram::<u64>::new(3).unwrap();
        assert!(text(&times, 1.0).contains("Total count    =            0]"));
    }
}
