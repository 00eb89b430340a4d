//! The book alone; events are counted and dropped. Load: 1,000 orders rest on 100 levels per side;
//! one iteration is one command pair.

use benches::{Desk, instrument};
use criterion::{Criterion, criterion_group, criterion_main};
use engine::{Book, BookConfig, EventSink};
use types::event::Quote;
use types::{EventEnvelope, InstrumentIx, Side, TimeInForce};

struct Count(u64);

impl EventSink for Count {
    fn event(&mut self, _: &EventEnvelope) {
        self.0 += 1;
    }

    fn quote(&mut self, _: InstrumentIx, _: Quote) {}
}

fn filled() -> (Book, Desk, Count) {
    let (mut book, mut desk, mut count) = (
        Book::new(instrument(InstrumentIx(0), "BENCH"), BookConfig::default()),
        Desk::new(8_192),
        Count(0),
    );
    book.apply(&desk.open(), &mut count);
    for at in 0..1_000i64 {
        book.apply(
            &desk
                .order(Side::Buy, TimeInForce::Gtc, 50_000 - at % 100, 10)
                .0,
            &mut count,
        );
        book.apply(
            &desk
                .order(Side::Sell, TimeInForce::Gtc, 50_001 + at % 100, 10)
                .0,
            &mut count,
        );
    }
    (book, desk, count)
}

fn bench(criterion: &mut Criterion) {
    let (mut book, mut desk, mut count) = filled();
    let mut at = 0i64;
    criterion.bench_function("book/new and cancel behind the best price", |bencher| {
        bencher.iter(|| {
            at += 1;
            let (new, handle) = desk.order(Side::Buy, TimeInForce::Gtc, 49_990 - at % 50, 10);
            book.apply(&new, &mut count);
            book.apply(&desk.cancel(handle), &mut count);
            desk.closed(handle);
        });
    });

    // An empty book, so that the offer is filled and both slots become free.
    let (mut book, mut desk, mut count) = (
        Book::new(instrument(InstrumentIx(0), "BENCH"), BookConfig::default()),
        Desk::new(64),
        Count(0),
    );
    book.apply(&desk.open(), &mut count);
    criterion.bench_function("book/offer and the taker that fills it", |bencher| {
        bencher.iter(|| {
            let (offer, maker) = desk.order(Side::Sell, TimeInForce::Gtc, 50_001, 10);
            let (bid, taker) = desk.order(Side::Buy, TimeInForce::Ioc, 50_001, 10);
            book.apply(&offer, &mut count);
            book.apply(&bid, &mut count);
            desk.closed(maker);
            desk.closed(taker);
        });
    });
    assert!(count.0 > 0, "the book reported no events");
}

criterion_group!(benches, bench);
criterion_main!(benches);
