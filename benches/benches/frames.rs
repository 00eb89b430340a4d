//! The journal's frames. Load: a command payload of 120 bytes.

use criterion::{Criterion, criterion_group, criterion_main};
use journal::FrameKind;
use journal::frame;

fn bench(criterion: &mut Criterion) {
    let payload = [7u8; 120];
    let mut out = Vec::with_capacity(1 << 20);
    criterion.bench_function("frames/write and seal 1000", |bencher| {
        bencher.iter(|| {
            out.clear();
            for sequence in 1..=1_000 {
                frame::write(
                    &mut out,
                    FrameKind::Command,
                    true,
                    sequence,
                    sequence,
                    &payload,
                );
            }
            frame::seal(&mut out, 1, 0)
        });
    });
    criterion.bench_function("frames/read 1", |bencher| {
        bencher.iter(|| frame::read(&out))
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
