//! The bare statements of the `history` benchmark write the rows that the history writes. Otherwise
//! the benchmark would compare different work.

use benches::generate::{Shape, generate};
use benches::history::{Baseline, BaselineRows, Source};
use gateway::projection::Projection;
use replica::{Batch, State};
use sequencer::Durable;
use types::NodeId;

const RECORDS: u64 = 5_000;
/// Records per transaction, few enough that later transactions change orders of earlier ones.
const BATCH: usize = 500;

#[tokio::test]
async fn bare_statements_write_the_rows_of_the_history() {
    let node = NodeId::new(1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (file, bare_file) = (folder.path().join("history"), folder.path().join("bare"));
    let open = |path| Projection::open(path, node, Durable::new("history"));
    let history = open(file.clone()).await.unwrap();
    let bare = open(bare_file.clone()).await.unwrap();
    bare.db.file.close().await;

    let mut state = State::new(node, sequencer::limits());
    let writer = history.writer(state.names().clone());
    let mut records = Source::new(generate(Shape::SINGLE, 1, RECORDS));
    let mut rows = Vec::new();
    loop {
        let next = records.by_ref().take(BATCH);
        let applied: Vec<_> = next.map(|record| state.apply(&record).unwrap()).collect();
        if applied.is_empty() {
            break;
        }
        let batch = [Batch::new(applied)];
        rows.push(BaselineRows::of(&batch));
        writer.write(batch.into()).await.unwrap();
    }
    history.db.file.close().await;
    Baseline::open(&bare_file).unwrap().write(&rows).unwrap();

    let [written, bare] = [&file, &bare_file].map(|path| Baseline::digest(path).unwrap());
    assert_eq!(written, bare);
    assert!(written[0] > 1_000 && written[2] > 100, "{written:?}");
    let updates: usize = rows.iter().map(BaselineRows::update_count).sum();
    assert!(updates > 100, "{updates}");
}
