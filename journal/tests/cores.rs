//! Cores of the log's threads.

use std::sync::Arc;

use journal::fault::MemoryStorage;
use journal::{Config, Journal};
use rustix::thread::{CpuSet, sched_getaffinity};

const CONFIG: Config = Config {
    segment_bytes: 16 << 10,
    pending_bytes_max: 64 << 10,
    recent_bytes: 64 << 10,
};

/// Cores on which this process's thread `journal` may run. The file has one test, so there is one.
fn cores_of_the_writer() -> String {
    for thread in std::fs::read_dir("/proc/self/task").expect("threads") {
        let thread = thread.expect("a thread").path();
        let read = |name: &str| std::fs::read_to_string(thread.join(name));
        // The read fails if the thread has ended meanwhile.
        if read("comm").is_ok_and(|name| name.trim() == "journal") {
            let status = read("status").expect("the writer runs");
            let cores = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            return cores.expect("a list").trim().to_owned();
        }
    }
    panic!("no thread is called `journal`")
}

#[test]
fn the_writer_is_kept_on_a_core_or_off_the_spinning_ones() {
    let storage = Arc::new(MemoryStorage::default());
    let journal = Journal::open(Arc::new(storage), CONFIG, |_| Ok(())).expect("opens");
    let allowed = sched_getaffinity(None).expect("a set");
    let cores = || (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    let first = cores().next().expect("a core");

    // Off all cores: the threads stay where they are. The call waits for the writer's start.
    journal.keep_off(0..usize::MAX);
    let any = cores_of_the_writer();
    // On a core that no machine has: a warning, and they stay.
    journal.keep_on(usize::MAX);
    assert_eq!(cores_of_the_writer(), any);

    journal.keep_off(first..first + 1);
    if cores().count() > 1 {
        assert_ne!(cores_of_the_writer(), any);
    }
    journal.keep_on(first);
    assert_eq!(cores_of_the_writer(), first.to_string());
}
