//! The order book alone. Events are counted and dropped. One iteration is two commands.
//!
//! Load of the first benchmark: 1,000 orders rest on 100 levels per side. The second starts with an
//! empty book.

use benches::{CommandFactory, instrument};
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

fn filled_book() -> (Book, CommandFactory, Count) {
    let (mut book, mut commands, mut count) = (
        Book::new(instrument(InstrumentIx(0), "BENCH"), BookConfig::default()),
        CommandFactory::new(8_192),
        Count(0),
    );
    book.apply(&commands.set_instrument(), &mut count);
    for at in 0..1_000i64 {
        book.apply(
            &commands
                .order(Side::Buy, TimeInForce::Gtc, 50_000 - at % 100, 10)
                .0,
            &mut count,
        );
        book.apply(
            &commands
                .order(Side::Sell, TimeInForce::Gtc, 50_001 + at % 100, 10)
                .0,
            &mut count,
        );
    }
    (book, commands, count)
}

fn bench(criterion: &mut Criterion) {
    let (mut book, mut commands, mut count) = filled_book();
    let mut at = 0i64;
    criterion.bench_function("book/new and cancel behind the best price", |bencher| {
        bencher.iter(|| {
            at += 1;
            let (new, handle) = commands.order(Side::Buy, TimeInForce::Gtc, 49_990 - at % 50, 10);
            book.apply(&new, &mut count);
            book.apply(&commands.cancel(handle), &mut count);
            commands.free_slot(handle);
        });
    });

    // The book is empty, so the bid fills the offer and both slots become free.
    let (mut book, mut commands, mut count) = (
        Book::new(instrument(InstrumentIx(0), "BENCH"), BookConfig::default()),
        CommandFactory::new(64),
        Count(0),
    );
    book.apply(&commands.set_instrument(), &mut count);
    criterion.bench_function("book/offer and the taker that fills it", |bencher| {
        bencher.iter(|| {
            let (offer, maker) = commands.order(Side::Sell, TimeInForce::Gtc, 50_001, 10);
            let (bid, taker) = commands.order(Side::Buy, TimeInForce::Ioc, 50_001, 10);
            book.apply(&offer, &mut count);
            book.apply(&bid, &mut count);
            commands.free_slot(maker);
            commands.free_slot(taker);
        });
    });
    assert!(count.0 > 0, "the book reported no events");
}

criterion_group!(benches, bench);
criterion_main!(benches);
