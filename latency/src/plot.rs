//! Plots HDR histograms as plain SVG: time over percentile, both logarithmic, so that the tail is
//! as wide as the middle.

use std::fmt::Write;

use hdrhistogram::Histogram;

/// One curve.
pub struct Line<'a> {
    name: &'a str,
    times: &'a Histogram<u64>,
    /// Counts of the histogram per unit of the plot.
    scale: f64,
}

impl<'a> Line<'a> {
    pub fn new(name: &'a str, times: &'a Histogram<u64>, scale: f64) -> Self {
        Self { name, times, scale }
    }

    /// Value at a quantile; at least a tenth of the unit, so that its logarithm exists.
    fn at(&self, quantile: f64) -> f64 {
        (self.times.value_at_quantile(quantile) as f64 / self.scale).max(0.1)
    }
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const FONT: &str = r#"font-family="sans-serif" font-size="12""#;
/// Margins for the labels.
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 50.0;
const TOP: f64 = 40.0;
const RIGHT: f64 = 20.0;
/// Nines of the last percentile drawn.
const NINES: u32 = 5;
const STEPS: u32 = 60;
const COLOURS: [&str; 4] = ["#1f5fa8", "#b8541a", "#3a8a3a", "#7a4fa0"];

fn quantile(nines: f64) -> f64 {
    1.0 - 10f64.powf(-nines)
}

/// Plot of the curves; `unit` names the value axis.
pub fn svg(title: &str, unit: &str, lines: &[Line]) -> String {
    let last = f64::from(NINES);
    let ends = lines
        .iter()
        .flat_map(|line| [line.at(0.0), line.at(quantile(last))]);
    let (low, high) = ends.fold((f64::MAX, 1.0f64), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    let (from, to) = (low.log10().floor(), high.log10().ceil());
    let to = to.max(from + 1.0);
    let x = |nines: f64| LEFT + (WIDTH - LEFT - RIGHT) * nines / last;
    let y = |value: f64| {
        HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value.log10() - from) / (to - from)
    };
    let mut out = String::new();
    let mut put = |text: std::fmt::Arguments| {
        out.write_fmt(text).expect("a string takes everything");
        out.push('\n');
    };
    put(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>
<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>
<text x="{LEFT}" y="22" font-size="15">{title}</text>"#
    ));
    for nines in 0..=NINES {
        let at = x(f64::from(nines));
        let percent = quantile(f64::from(nines)) * 100.0;
        let digits = nines.saturating_sub(2) as usize;
        put(format_args!(
            r##"<path d="M{at:.1} {TOP}V{:.1}" stroke="#ddd"/>"##,
            HEIGHT - BOTTOM
        ));
        put(format_args!(
            r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{percent:.digits$} %</text>"#,
            HEIGHT - BOTTOM + 18.0
        ));
    }
    for power in from as i32..=to as i32 {
        let value = 10f64.powi(power);
        let at = y(value);
        put(format_args!(
            r##"<path d="M{LEFT} {at:.1}H{:.1}" stroke="#ddd"/>"##,
            WIDTH - RIGHT
        ));
        put(format_args!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{value} {unit}</text>"#,
            LEFT - 6.0,
            at + 4.0
        ));
    }
    for (number, line) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let points: Vec<String> = (0..=STEPS)
            .map(|step| last * f64::from(step) / f64::from(STEPS))
            .map(|nines| format!("{:.1},{:.1}", x(nines), y(line.at(quantile(nines)))))
            .collect();
        put(format_args!(
            r#"<polyline fill="none" stroke="{colour}" stroke-width="2" points="{}"/>"#,
            points.join(" ")
        ));
        put(format_args!(
            r#"<text x="{:.1}" y="{:.1}" fill="{colour}">{}</text>"#,
            LEFT + 12.0,
            TOP + 18.0 * (number as f64 + 1.0),
            line.name
        ));
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_its_curves_inside() {
        let mut times = Histogram::new(3).unwrap();
        for value in 1..10_000u64 {
            times.record(value).unwrap();
        }
        let picture = svg("Title", "us", &[Line::new("one", &times, 1_000.0)]);
        assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
        let points = picture.split("points=\"").nth(1).unwrap();
        let points = points.split('"').next().unwrap();
        for point in points.split(' ') {
            let (x, y) = point.split_once(',').unwrap();
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((LEFT..=WIDTH - RIGHT).contains(&x));
            assert!((TOP..=HEIGHT - BOTTOM).contains(&y));
        }
    }

    #[test]
    fn an_empty_histogram_is_drawn_too() {
        let times = Histogram::new(3).unwrap();
        assert!(svg("Title", "ns", &[Line::new("none", &times, 1.0)]).contains("polyline"));
        assert!(svg("Title", "ns", &[]).contains("</svg>"));
    }
}
