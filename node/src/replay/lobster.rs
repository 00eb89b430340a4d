//! Order flow in the LOBSTER message format: `time_s,type,order_id,size,price_x10000,direction`,
//! one row per line.
//!
//! Types: 1 new limit order, 2 partial cancel, 3 full delete, 4 execution of a visible order, 5
//! execution of a hidden one, 6 cross, 7 halt. The direction is the resting order's: 1 buy, -1
//! sell.

use std::io::BufRead;
use std::path::Path;

use anyhow::{Context, bail};

/// One row of a message file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub time_ns: u64,
    pub kind: Kind,
    pub order_id: u64,
    /// Shares.
    pub size: u64,
    /// Ten-thousandths of the currency unit.
    pub price_x10000: i64,
    /// Side of the resting order.
    pub is_buy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    New,
    Reduce,
    Delete,
    Execute,
    ExecuteHidden,
    Other,
}

/// Reads a message file.
///
/// # Errors
/// The first malformed line, with its number.
pub fn read(path: &Path) -> anyhow::Result<Vec<Row>> {
    let file =
        std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut rows = Vec::new();
    for (at, line) in std::io::BufReader::new(file).lines().enumerate() {
        let line = line.with_context(|| format!("cannot read {}", path.display()))?;
        if line.trim().is_empty() {
            continue;
        }
        rows.push(parse(&line).with_context(|| format!("{}, line {}", path.display(), at + 1))?);
    }
    if rows.is_empty() {
        bail!("{} has no rows", path.display());
    }
    Ok(rows)
}

/// Reads one line.
pub fn parse(line: &str) -> anyhow::Result<Row> {
    let fields: Vec<&str> = line.trim().split(',').collect();
    let [time, kind, order_id, size, price, direction, ..] = fields.as_slice() else {
        bail!("expected six fields: time,type,order id,size,price,direction");
    };
    let (seconds, fraction) = time.split_once('.').unwrap_or((time, "0"));
    if fraction.is_empty() || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        bail!("`{time}` is not a time in seconds");
    }
    // Files written from floats have meaningless digits after the nanoseconds.
    let fraction = &fraction[..fraction.len().min(9)];
    let nanos =
        fraction.parse::<u64>().context("time")? * 10u64.pow(9 - u32::try_from(fraction.len())?);
    let kind = match *kind {
        "1" => Kind::New,
        "2" => Kind::Reduce,
        "3" => Kind::Delete,
        "4" => Kind::Execute,
        "5" => Kind::ExecuteHidden,
        "6" | "7" => Kind::Other,
        other => bail!("`{other}` is not a row type"),
    };
    let seconds = seconds.parse::<u64>().context("time")?;
    let time_ns = seconds
        .checked_mul(1_000_000_000)
        .and_then(|ns| ns.checked_add(nanos));
    Ok(Row {
        time_ns: time_ns.with_context(|| format!("`{time}` exceeds 64 bits of nanoseconds"))?,
        kind,
        order_id: order_id.parse().context("order id")?,
        size: size.parse().context("size")?,
        price_x10000: price.parse().context("price")?,
        is_buy: match *direction {
            "1" => true,
            "-1" => false,
            other if kind == Kind::Other => other == "1",
            other => bail!("`{other}` is not a direction"),
        },
    })
}

/// Writes a row in the format that [`parse`] reads.
pub fn format(row: &Row) -> String {
    let kind = match row.kind {
        Kind::New => 1,
        Kind::Reduce => 2,
        Kind::Delete => 3,
        Kind::Execute => 4,
        Kind::ExecuteHidden => 5,
        Kind::Other => 7,
    };
    format!(
        "{}.{:09},{kind},{},{},{},{}",
        row.time_ns / 1_000_000_000,
        row.time_ns % 1_000_000_000,
        row.order_id,
        row.size,
        row.price_x10000,
        if row.is_buy { 1 } else { -1 }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_round_trips() {
        let row = parse("34200.004241176,1,16113575,18,5853300,1").expect("row");
        assert_eq!(row.time_ns, 34_200_004_241_176);
        assert_eq!((row.kind, row.size, row.is_buy), (Kind::New, 18, true));
        assert_eq!(format(&row), "34200.004241176,1,16113575,18,5853300,1");
    }

    #[test]
    fn nonsense_is_refused() {
        for line in [
            "",
            "1,2,3",
            "x,1,1,1,1,1",
            "1.0,9,1,1,1,1",
            "1.0,1,1,-5,1,1",
            "1.0,1,1,1,1,0",
            // Above 64 bits of nanoseconds.
            "18446744074.0,1,1,1,1,1",
            "18446744073.709551616,1,1,1,1,1",
        ] {
            parse(line).expect_err(line);
        }
    }
}
