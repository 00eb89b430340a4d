//! Writing and reading of journal frames. Load: command frames with a payload of 120 bytes.

use criterion::{Criterion, criterion_group, criterion_main};
use journal::FrameKind;
use journal::aligned::Buffer;
use journal::frame;

fn bench(criterion: &mut Criterion) {
    let payload = [7u8; 120];
    let mut out = Buffer::with_capacity(1 << 20);
    criterion.bench_function("frames/write 1000", |bencher| {
        bencher.iter(|| {
            out.resize(0);
            for sequence in 1..=1_000 {
                frame::write(
                    &mut out,
                    FrameKind::Command,
                    true,
                    sequence,
                    sequence,
                    0,
                    &payload,
                );
            }
            frame::add_checksums(out.bytes_mut(), 0)
        });
    });
    criterion.bench_function("frames/read 1", |bencher| {
        bencher.iter(|| frame::read(out.bytes()))
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
