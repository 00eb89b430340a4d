//! Text output for a terminal.

use std::fmt;

use super::{Listing, State, Verified, Written};
use crate::record::Record;

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>10} {:>12} {:>12} {:>12} {:>12} {:>9}  file",
            "segment", "first", "last", "bytes", "written", "batches"
        )?;
        for line in &self.segments {
            let word = |number: Option<u64>| number.map_or("-".to_owned(), |n| n.to_string());
            writeln!(
                f,
                "{:>10} {:>12} {:>12} {:>12} {:>12} {:>9}  {}",
                line.number,
                word(line.first),
                word(line.last),
                line.bytes,
                line.used_bytes,
                line.batches,
                line.file
            )?;
        }
        for line in &self.snapshots {
            let state = if line.is_whole { "" } else { ", damaged" };
            writeln!(f, "snapshot at {}{state}", line.sequence)?;
        }
        Ok(())
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "commands {} to {} in {} segments: {} commands, {} events, chain whole",
            self.first, self.last, self.segments, self.commands, self.events
        )?;
        match self.compared_after {
            Some(after) => writeln!(
                f,
                "events after {after} computed again: all as journalled; {} trades, state hash {}",
                self.trades, self.state_hash
            )?,
            None => writeln!(
                f,
                "events not computed again: the beginning was removed and no snapshot replaces it"
            )?,
        }
        for sequence in &self.snapshots {
            writeln!(f, "snapshot at {sequence}: restores")?;
        }
        for sequence in &self.bad_snapshots {
            writeln!(f, "snapshot at {sequence}: does not restore")?;
        }
        if let Some((file, offset)) = &self.torn_tail {
            writeln!(
                f,
                "torn tail in {file} at offset {offset}: the next start truncates it"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} {} {:?}",
            self.command.sequence.get(),
            self.command.time_ns,
            self.command.command
        )?;
        for event in &self.events {
            writeln!(
                f,
                "    {}.{} {:?}",
                event.instrument, event.number, event.event
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "sequence {}, time {} ns, {} trades, state hash {}",
            self.sequence, self.time_ns, self.trades, self.state_hash
        )?;
        for book in &self.books {
            writeln!(
                f,
                "{} {}: {} orders, state hash {}",
                book.instrument, book.phase, book.orders, book.state_hash
            )?;
            // As on a screen: the best prices meet in the middle.
            let asks = book.asks.iter().rev().map(|level| ("ask", level));
            for (side, level) in asks.chain(book.bids.iter().map(|level| ("bid", level))) {
                writeln!(
                    f,
                    "  {side} {:>16} {:>16} in {} orders",
                    level.price, level.quantity, level.orders
                )?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "snapshot at {} written: {} bytes, state hash {}",
            self.sequence, self.bytes, self.state_hash
        )
    }
}
