//! The resend windows of sessions: encoded messages in pages of a pool that all sessions share.
//!
//! A message takes a slot of [`SLOT_BYTES`], so that a message is found by its number without a
//! search. The message that answers a request is found by binary search: answers are in the order
//! of their requests, and each slot contains the last request that was answered up to it.
//!
//! The pool bounds the memory of all windows and counts the pages of each user. Another thread
//! allocates and touches pages in advance. Nothing is allocated once the pool has all its pages.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, sync_channel};

use sequencer::priority;
use types::UserIx;
use wire::ServerMessage;

/// Bytes of a slot: the longest numbered message and its length.
pub const SLOT_BYTES: usize = 128;
const PAGE_SLOTS: usize = 32;
const PAGE_BYTES: usize = PAGE_SLOTS * SLOT_BYTES;
/// Pages per block. The pool allocates whole blocks.
const BLOCK_PAGES: usize = 64;
/// Number of blocks that are allocated in advance.
const BLOCKS_AHEAD: usize = 2;
/// A user's share of the pool is its size divided by this.
const SHARES: usize = 4;

const _: () = assert!(wire::NUMBERED_LEN_MAX < SLOT_BYTES);

#[derive(Clone)]
struct Page {
    bytes: [u8; PAGE_BYTES],
    answers: [AnswerMark; PAGE_SLOTS],
}

/// The last request answered by a slot's message or an earlier one.
#[derive(Clone, Copy, Default)]
struct AnswerMark {
    /// Its client sequence; 0 = none yet.
    client_seq: u64,
    /// True if the slot's own message is the answer.
    is_own: bool,
}

/// [`BLOCK_PAGES`] pages.
type Block = Box<[Page]>;

fn block() -> Block {
    let page = Page {
        bytes: [0; PAGE_BYTES],
        answers: [AnswerMark::default(); PAGE_SLOTS],
    };
    vec![page; BLOCK_PAGES].into_boxed_slice()
}

/// Pages for the windows of all sessions.
pub struct PagePool {
    blocks: Vec<Block>,
    free: Vec<u32>,
    pages_max: usize,
    /// Pages in use, by user.
    used: Vec<usize>,
    /// Blocks allocated in advance.
    ahead: Receiver<Block>,
}

impl PagePool {
    /// A pool for about `bytes_max` bytes of messages.
    pub fn new(bytes_max: usize) -> Self {
        let (made, ahead) = sync_channel(BLOCKS_AHEAD);
        // The thread ends with the pool. Without the thread the pool allocates its blocks itself.
        let making = move || while made.send(block()).is_ok() {};
        if let Err(error) = priority::spawn("window-pages", making) {
            tracing::warn!(%error, "no thread for window pages: the front allocates them itself");
        }
        Self {
            blocks: Vec::new(),
            free: Vec::new(),
            pages_max: bytes_max.div_ceil(PAGE_BYTES).max(BLOCK_PAGES),
            used: Vec::new(),
            ahead,
        }
    }

    /// True when the next page would exceed the limit.
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.blocks.len() * BLOCK_PAGES >= self.pages_max
    }

    /// Pages that a user may keep while the pool is full.
    pub fn share(&self) -> usize {
        self.pages_max / SHARES
    }

    /// Pages of the windows of a user's sessions.
    pub fn used(&self, user: UserIx) -> usize {
        self.used.get(user.index()).copied().unwrap_or(0)
    }

    /// Allocates a page, even above the limit: a message that is not durable yet exists nowhere
    /// else.
    fn allocate(&mut self, user: UserIx) -> u32 {
        if self.used.len() <= user.index() {
            self.used.resize(user.index() + 1, 0);
        }
        self.used[user.index()] += 1;
        if self.free.is_empty() {
            let count = self.blocks.len() * BLOCK_PAGES;
            let from = u32::try_from(count).expect("pages are counted by 32 bits");
            self.blocks
                .push(self.ahead.try_recv().unwrap_or_else(|_| block()));
            self.free.extend((from..from + BLOCK_PAGES as u32).rev());
        }
        self.free.pop().expect("just made")
    }

    /// Frees a page.
    fn release(&mut self, user: UserIx, page: u32) {
        self.used[user.index()] -= 1;
        self.free.push(page);
    }

    fn page(&self, page: u32) -> &Page {
        let page = page as usize;
        &self.blocks[page / BLOCK_PAGES][page % BLOCK_PAGES]
    }

    fn page_mut(&mut self, page: u32) -> &mut Page {
        let page = page as usize;
        &mut self.blocks[page / BLOCK_PAGES][page % BLOCK_PAGES]
    }
}

/// Result of comparing a message in a window with a rebuilt one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    Equal,
    Differs,
    /// The message has left the window, or is not in it yet.
    NotKept,
}

/// What a window knows of the answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptAnswer {
    /// Number of the kept message that answers it.
    Number(u64),
    /// The client has skipped the request: the answers around it are kept.
    NeverSent,
    /// The answer has left the window, or is not in it yet.
    Unknown,
}

/// The last messages of one session.
pub struct Window {
    /// The pages count for this user.
    user: UserIx,
    pages: VecDeque<u32>,
    /// Slot of the first message in the first page.
    skip: usize,
    count: usize,
    /// Number of the session's last message, whether or not it is in the window.
    last: u64,
    /// Client sequence of the last request answered.
    answered: u64,
}

impl Window {
    /// An empty window. `last`: number of the session's last message. `answered`: client sequence
    /// of the last request answered.
    pub fn after(user: UserIx, last: u64, answered: u64) -> Self {
        Self {
            user,
            pages: VecDeque::new(),
            skip: 0,
            count: 0,
            last,
            answered,
        }
    }

    /// Number of the oldest kept message; of the next message if the window is empty.
    pub fn first(&self) -> u64 {
        self.last + 1 - self.count as u64
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// Page (index in `pages`) and slot of a kept message.
    fn slot(&self, number: u64) -> (usize, usize) {
        let at = self.skip + (number - self.first()) as usize;
        (at / PAGE_SLOTS, at % PAGE_SLOTS)
    }

    /// Appends the next message, encoded for channel 0. `answers`: client sequence of the request
    /// that it answers; 0 for none. True when a page was allocated.
    ///
    /// # Panics
    /// `number` is not the next number.
    pub fn push(
        &mut self,
        pool: &mut PagePool,
        number: u64,
        message: &ServerMessage,
        answers: u64,
    ) -> bool {
        assert_eq!(number, self.last + 1, "a session's numbers have no gap");
        let end = self.skip + self.count;
        let takes_page = end == self.pages.len() * PAGE_SLOTS;
        if takes_page {
            self.pages.push_back(pool.allocate(self.user));
        }
        self.last = number;
        self.count += 1;
        let page = pool.page_mut(self.pages[end / PAGE_SLOTS]);
        let at = end % PAGE_SLOTS;
        // Only the first message for a request is its answer.
        let is_own = answers > self.answered;
        self.answered = self.answered.max(answers);
        page.answers[at] = AnswerMark {
            client_seq: self.answered,
            is_own,
        };
        let slot = &mut page.bytes[at * SLOT_BYTES..(at + 1) * SLOT_BYTES];
        let length = wire::encode_into(message, 0, number, &mut slot[1..]);
        slot[0] = length as u8;
        takes_page
    }

    /// The bytes of a kept message.
    pub fn get<'a>(&self, pool: &'a PagePool, number: u64) -> &'a [u8] {
        let (page, at) = self.slot(number);
        let page = pool.page(self.pages[page]);
        let slot = &page.bytes[at * SLOT_BYTES..(at + 1) * SLOT_BYTES];
        &slot[1..1 + usize::from(slot[0])]
    }

    /// Compares a kept message with one encoded for channel 0.
    pub fn compare(&self, pool: &PagePool, number: u64, bytes: &[u8]) -> Compared {
        if number < self.first() || number > self.last {
            return Compared::NotKept;
        }
        match self.get(pool, number) == bytes {
            true => Compared::Equal,
            false => Compared::Differs,
        }
    }

    /// The answer to a request. Cost: logarithmic in the window's length.
    pub fn answer(&self, pool: &PagePool, client_seq: u64) -> KeptAnswer {
        let (mut low, mut high) = (self.first(), self.last + 1);
        while low < high {
            let middle = low + (high - low) / 2;
            match self.answered(pool, middle).client_seq < client_seq {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        if low > self.last {
            return KeptAnswer::Unknown;
        }
        let found = self.answered(pool, low);
        if found.client_seq == client_seq && found.is_own {
            return KeptAnswer::Number(low);
        }
        match low > self.first() {
            true => KeptAnswer::NeverSent,
            false => KeptAnswer::Unknown,
        }
    }

    fn answered(&self, pool: &PagePool, number: u64) -> AnswerMark {
        let (page, at) = self.slot(number);
        pool.page(self.pages[page]).answers[at]
    }

    /// Drops the oldest page, unless it has messages after `through`. True when a page was freed.
    pub fn shrink(&mut self, pool: &mut PagePool, through: u64) -> bool {
        let dropped = (PAGE_SLOTS - self.skip).min(self.count);
        if dropped == 0 || self.first() + dropped as u64 - 1 > through {
            return false;
        }
        self.count -= dropped;
        self.skip = 0;
        let page = self.pages.pop_front().expect("messages are in pages");
        pool.release(self.user, page);
        true
    }

    /// Drops every message up to `through`, in whole pages.
    pub fn clear(&mut self, pool: &mut PagePool, through: u64) {
        while self.shrink(pool, through) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::MassCancelled;

    fn message(client_seq: u64) -> ServerMessage {
        MassCancelled {
            client_seq,
            instrument: 0,
            count: 0,
            remaining: 0,
            node_sequence: 0,
            time_ns: 0,
        }
        .into()
    }

    #[test]
    fn messages_are_found_by_number_and_by_request_until_they_are_forgotten() {
        let mut pool = PagePool::new(1 << 20);
        let mut window = Window::after(UserIx(0), 10, 0);
        // Every third message answers a request; requests have gaps.
        for number in 11..=400u64 {
            let answers = if number % 3 == 0 { number * 10 } else { 0 };
            window.push(&mut pool, number, &message(number), answers);
        }
        let check = |window: &Window, pool: &PagePool| {
            for number in window.first()..=window.last {
                let bytes = window.get(pool, number);
                let (header, found) = wire::parse::<ServerMessage>(bytes).unwrap().unwrap();
                assert_eq!((header.sequence, found), (number, message(number)));
                let wanted = match number % 3 {
                    0 => KeptAnswer::Number(number),
                    // Its answer may still come.
                    _ if number == 400 => KeptAnswer::Unknown,
                    _ => KeptAnswer::NeverSent,
                };
                assert_eq!(window.answer(pool, number * 10), wanted, "{number}");
            }
            // In the window's first state no message has left it.
            let of_a_gap = match window.first() {
                11 => KeptAnswer::NeverSent,
                _ => KeptAnswer::Unknown,
            };
            assert_eq!(window.answer(pool, 5), of_a_gap);
            assert_eq!(window.answer(pool, 1_000_000), KeptAnswer::Unknown);
        };
        check(&window, &pool);
        assert!(window.shrink(&mut pool, 400) && window.shrink(&mut pool, 400));
        assert_eq!((window.first(), window.last), (11 + 64, 400));
        check(&window, &pool);
        let compare = |number: u64, is: u64| {
            let mut bytes = bytes::BytesMut::new();
            wire::encode(&message(is), 0, number, &mut bytes);
            window.compare(&pool, number, &bytes)
        };
        assert_eq!(compare(75, 75), Compared::Equal);
        assert_eq!(compare(75, 76), Compared::Differs);
        assert_eq!(compare(74, 74), Compared::NotKept);
        assert_eq!(compare(401, 401), Compared::NotKept);
        assert!(
            !window.shrink(&mut pool, 100),
            "the page has messages after 100"
        );
        window.clear(&mut pool, 400);
        assert_eq!((window.len(), window.first()), (0, 401));
        window.push(&mut pool, 401, &message(401), 4_001);
        assert_eq!(window.answer(&pool, 4_001), KeptAnswer::Number(401));
    }

    #[test]
    fn an_answer_that_has_left_the_window_is_not_found_in_later_messages() {
        let mut pool = PagePool::new(1 << 20);
        let mut window = Window::after(UserIx(0), 0, 0);
        window.push(&mut pool, 1, &message(1), 7);
        for number in 2..=10_000 {
            window.push(&mut pool, number, &message(number), 0);
        }
        assert_eq!(window.answer(&pool, 7), KeptAnswer::Number(1));
        assert!(window.shrink(&mut pool, 10_000));
        for client_seq in [7, 8] {
            assert_eq!(window.answer(&pool, client_seq), KeptAnswer::Unknown);
        }
        window.push(&mut pool, 10_001, &message(10_001), 8);
        assert_eq!(window.answer(&pool, 8), KeptAnswer::Number(10_001));
    }

    #[test]
    fn freed_pages_are_reused() {
        let mut pool = PagePool::new(0);
        let [mut one, mut other] = [2, 5].map(|user| Window::after(UserIx(user), 0, 0));
        for round in 0..50u64 {
            for number in 1..=320 {
                one.push(&mut pool, round * 320 + number, &message(number), 0);
            }
            one.clear(&mut pool, (round + 1) * 320);
            other.push(&mut pool, round + 1, &message(round), 0);
            assert_eq!(pool.used(UserIx(2)), 0);
        }
        assert_eq!(pool.blocks.len(), 1);
        let used = [0, 2, 5, 9].map(|user| pool.used(UserIx(user)));
        assert_eq!(used, [0, 0, 2, 0], "each user's own");
    }
}
