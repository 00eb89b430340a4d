//! The resend windows of sessions: encoded messages in pages of a pool that all sessions share.
//!
//! A message takes a slot of [`PLACE_BYTES`], so that a number needs no search. The message that
//! answers a request is found by binary search, since answers are in the order of their requests.
//! The pool's size bounds the memory of all windows. Nothing is allocated once the pool has its
//! pages.

use std::collections::VecDeque;

use wire::ServerMessage;

/// Bytes of a slot: the longest numbered message and its length.
pub const PLACE_BYTES: usize = 128;
const PLACES: usize = 32;
const PAGE_BYTES: usize = PLACES * PLACE_BYTES;
/// Pages allocated at once.
const PAGES_MORE: usize = 64;

const _: () = assert!(wire::NUMBERED_LEN_MAX < PLACE_BYTES);

#[derive(Clone)]
struct Page {
    bytes: Box<[u8; PAGE_BYTES]>,
    /// By slot: the request that the message answers, 0 for none.
    answers: [u64; PLACES],
}

/// Pages for the windows of all sessions.
pub struct PagePool {
    pages: Vec<Page>,
    free: Vec<u32>,
    pages_max: usize,
}

impl PagePool {
    /// Room for about `bytes_max` bytes of messages.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            pages: Vec::new(),
            free: Vec::new(),
            pages_max: bytes_max.div_ceil(PAGE_BYTES).max(PAGES_MORE),
        }
    }

    /// True when the next page would exceed the limit.
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.pages.len() >= self.pages_max
    }

    /// Takes a page, above the limit too: what is not durable yet exists nowhere else.
    fn take(&mut self) -> u32 {
        if self.free.is_empty() {
            let from = u32::try_from(self.pages.len()).expect("pages are counted by 32 bits");
            let page = Page {
                bytes: Box::new([0; PAGE_BYTES]),
                answers: [0; PLACES],
            };
            self.pages.resize(self.pages.len() + PAGES_MORE, page);
            self.free.extend((from..from + PAGES_MORE as u32).rev());
        }
        self.free.pop().expect("just made")
    }
}

/// Result of comparing a message in a window with a rebuilt one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    Equal,
    Differs,
    /// The message is not in the window any more, or not yet.
    NotKept,
}

/// The last messages of one session.
#[derive(Default)]
pub struct Window {
    pages: VecDeque<u32>,
    /// Slot of the first message in the first page.
    skip: usize,
    count: usize,
    /// Number of the last message, kept or not.
    last: u64,
}

impl Window {
    /// An empty window after `last`.
    pub fn after(last: u64) -> Self {
        Self {
            last,
            ..Self::default()
        }
    }

    /// Number of the oldest kept message, or of the next one.
    pub fn first(&self) -> u64 {
        self.last + 1 - self.count as u64
    }

    pub fn len(&self) -> usize {
        self.count
    }

    fn place(&self, number: u64) -> (usize, usize) {
        let at = self.skip + (number - self.first()) as usize;
        (at / PLACES, at % PLACES)
    }

    /// Keeps the next message, encoded for channel 0.
    pub fn push(
        &mut self,
        pool: &mut PagePool,
        number: u64,
        message: &ServerMessage,
        answers: u64,
    ) {
        assert_eq!(number, self.last + 1, "a session's numbers have no gap");
        let end = self.skip + self.count;
        if end == self.pages.len() * PLACES {
            self.pages.push_back(pool.take());
        }
        self.last = number;
        self.count += 1;
        let page = &mut pool.pages[self.pages[end / PLACES] as usize];
        let at = end % PLACES;
        page.answers[at] = answers;
        let place = &mut page.bytes[at * PLACE_BYTES..(at + 1) * PLACE_BYTES];
        let length = wire::encode_into(message, 0, number, &mut place[1..]);
        place[0] = length as u8;
    }

    /// The bytes of a kept message.
    pub fn get<'a>(&self, pool: &'a PagePool, number: u64) -> &'a [u8] {
        let (page, at) = self.place(number);
        let page = &pool.pages[self.pages[page] as usize];
        let place = &page.bytes[at * PLACE_BYTES..(at + 1) * PLACE_BYTES];
        &place[1..1 + usize::from(place[0])]
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

    /// Number of the kept message that answers a request. Cost: logarithmic in the window's length.
    pub fn answer(&self, pool: &PagePool, client_seq: u64) -> Option<u64> {
        let (mut low, mut high) = (self.first(), self.last + 1);
        while low < high {
            let middle = low + (high - low) / 2;
            // Messages that answer nothing belong to the answer before them.
            let (mut at, mut answers) = (middle, 0);
            while at >= low {
                answers = self.answers(pool, at);
                if answers != 0 {
                    break;
                }
                at -= 1;
            }
            match answers.cmp(&client_seq) {
                _ if answers == 0 => low = middle + 1,
                std::cmp::Ordering::Equal => return Some(at),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = at,
            }
        }
        None
    }

    fn answers(&self, pool: &PagePool, number: u64) -> u64 {
        let (page, at) = self.place(number);
        pool.pages[self.pages[page] as usize].answers[at]
    }

    /// Drops the oldest page's messages, but none after `through`; true when a page was freed.
    pub fn shrink(&mut self, pool: &mut PagePool, through: u64) -> bool {
        let goes = (PLACES - self.skip).min(self.count);
        if goes == 0 || self.first() + goes as u64 - 1 > through {
            return false;
        }
        self.count -= goes;
        self.skip = 0;
        let page = self.pages.pop_front().expect("messages are in pages");
        pool.free.push(page);
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
        let mut window = Window::after(10);
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
                let wanted = (number % 3 == 0).then_some(number);
                assert_eq!(window.answer(pool, number * 10), wanted, "{number}");
                assert_eq!(window.answer(pool, number * 10 + 1), None);
            }
            assert_eq!(window.answer(pool, 5), None);
            assert_eq!(window.answer(pool, 1_000_000), None);
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
        assert!(!window.shrink(&mut pool, 100), "not all of the page may go");
        window.clear(&mut pool, 400);
        assert_eq!((window.len(), window.first()), (0, 401));
        window.push(&mut pool, 401, &message(401), 7);
        assert_eq!(window.answer(&pool, 7), Some(401));
    }

    #[test]
    fn freed_pages_are_reused() {
        let mut pool = PagePool::new(0);
        let (mut one, mut other) = (Window::default(), Window::default());
        for round in 0..50u64 {
            for number in 1..=320 {
                one.push(&mut pool, round * 320 + number, &message(number), 0);
            }
            one.clear(&mut pool, (round + 1) * 320);
            other.push(&mut pool, round + 1, &message(round), 0);
        }
        assert_eq!(pool.pages.len(), PAGES_MORE);
    }
}
