//! When the next expiry command of each book is due, and of all books: a tournament tree.
//!
//! A command is due at the full [`STEP_NS`] after the book's earliest expiry, and ends every order
//! of the book that has expired. So a book has at most one in each step, however its members space
//! the dates of their orders.
//!
//! A change costs one comparison per level of the tree, twelve for 3,000 books. The earliest of all
//! is read without a search; its book is found in as many comparisons. Only a new book may
//! allocate.

/// Expiry of a book without an order that has one.
pub(crate) const NEVER: u64 = u64::MAX;
/// Steps of journalled time at which expiry commands are due: a millisecond.
const STEP_NS: u64 = 1_000_000;

#[derive(Default)]
pub(crate) struct Expiries {
    /// Node `n` has the earlier time of its children `2 * n` and `2 * n + 1`; node 1 is the root.
    /// The second half is the leaves: the books by index, a power of two of them.
    nodes: Vec<u64>,
}

impl Expiries {
    /// Sets the earliest expiry of a book, in journalled nanoseconds; [`NEVER`] without one.
    #[cold]
    pub fn set(&mut self, book: usize, at_ns: u64) {
        let due_ns = at_ns.checked_next_multiple_of(STEP_NS).unwrap_or(NEVER);
        if book >= self.nodes.len() / 2 {
            self.grow(book + 1);
        }
        let mut node = self.nodes.len() / 2 + book;
        self.nodes[node] = due_ns;
        while node > 1 {
            node /= 2;
            let earlier_ns = self.earlier_child_ns(node);
            if self.nodes[node] == earlier_ns {
                return;
            }
            self.nodes[node] = earlier_ns;
        }
    }

    /// When the next expiry command of all books is due.
    #[inline]
    pub fn next_ns(&self) -> Option<u64> {
        let root_ns = self.nodes.get(1).copied();
        root_ns.filter(|at_ns| *at_ns != NEVER)
    }

    /// The book of the next expiry command, and when that is due. Of several books the first by
    /// index.
    #[cold]
    pub fn next_book(&self) -> Option<(usize, u64)> {
        let due_ns = self.next_ns()?;
        let leaves = self.nodes.len() / 2;
        let mut node = 1;
        while node < leaves {
            node *= 2;
            node += usize::from(self.nodes[node] != due_ns);
        }
        Some((node - leaves, due_ns))
    }

    fn earlier_child_ns(&self, node: usize) -> u64 {
        self.nodes[2 * node].min(self.nodes[2 * node + 1])
    }

    fn grow(&mut self, books: usize) {
        let leaves = books.next_power_of_two();
        let before = std::mem::replace(&mut self.nodes, vec![NEVER; 2 * leaves]);
        let known = &before[before.len() / 2..];
        self.nodes[leaves..leaves + known.len()].copy_from_slice(known);
        for node in (1..leaves).rev() {
            self.nodes[node] = self.earlier_child_ns(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_earliest_expiry_is_that_of_a_sorted_set_over_200_000_changes() {
        const BOOKS: u64 = 3_000;
        let (mut expiries, mut model) = (Expiries::default(), BTreeSet::new());
        let mut of_books = vec![NEVER; BOOKS as usize];
        assert_eq!(expiries.next_ns(), None);
        let mut random = 0x9E37_79B9_7F4A_7C15_u64;
        for change in 0..200_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // A member places the order with the earliest expiry in one book and cancels it. Other
            // orders come and go in a growing number of books.
            let (book, at_ns) = match change % 4 {
                0 => (7, 1),
                1 => (7, NEVER),
                2 => (
                    random % (change / 50 + 1).min(BOOKS),
                    STEP_NS + (random >> 32) % (1_000 * STEP_NS),
                ),
                _ => (random % (change / 50 + 1).min(BOOKS), NEVER),
            };
            expiries.set(book as usize, at_ns);
            let due_ns = match at_ns {
                NEVER => NEVER,
                at_ns => at_ns.div_ceil(STEP_NS) * STEP_NS,
            };
            let before_ns = std::mem::replace(&mut of_books[book as usize], due_ns);
            model.remove(&(before_ns, book));
            if due_ns != NEVER {
                model.insert((due_ns, book));
            }
            let first = model.first();
            let first = first.map(|(due_ns, book)| (*book as usize, *due_ns));
            assert_eq!(expiries.next_book(), first, "change {change}");
            assert_eq!(expiries.next_ns(), first.map(|(_, due_ns)| due_ns));
        }
        assert!(model.len() > 500, "many books have dated orders");
        let nodes = expiries.nodes.len();
        assert_eq!(
            nodes, 8_192,
            "a change reads two nodes for each of twelve levels"
        );
    }

    #[test]
    fn one_book_is_its_own_earliest() {
        let mut expiries = Expiries::default();
        assert_eq!(expiries.next_book(), None);
        expiries.set(0, 5 * STEP_NS);
        assert_eq!(expiries.next_book(), Some((0, 5 * STEP_NS)));
        expiries.set(1, 4 * STEP_NS);
        assert_eq!(expiries.next_book(), Some((1, 4 * STEP_NS)));
        expiries.set(1, NEVER);
        assert_eq!(expiries.next_book(), Some((0, 5 * STEP_NS)));
        expiries.set(0, NEVER);
        assert_eq!(expiries.next_book(), None);
    }

    #[test]
    fn a_command_is_due_at_the_full_millisecond() {
        let mut expiries = Expiries::default();
        for (at_ns, due_ns) in [
            (1, Some(STEP_NS)),
            (STEP_NS, Some(STEP_NS)),
            (STEP_NS + 1, Some(2 * STEP_NS)),
            // Past the last full millisecond of 64 bits, in the year 2554.
            (NEVER - 1, None),
        ] {
            expiries.set(0, at_ns);
            assert_eq!(expiries.next_ns(), due_ns, "{at_ns}");
        }
    }
}
