//! Wakes waiting group members by topic after a publication.
//!
//! Members are registered by topic: a service has a dozen members that wait for rare records, and
//! each woken member reads the log. Invariant: a member is notified of every publication to its
//! topics since its last wait. Dropped members are removed at the next publication.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::Notify;

#[derive(Default)]
pub(super) struct Wakes(Mutex<HashMap<String, Vec<Weak<Notify>>>>);

impl Wakes {
    /// Registers one waiter for publications to these topics from now on.
    pub fn register(&self, topics: &[String]) -> Arc<Notify> {
        let notice = Arc::new(Notify::new());
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for topic in topics {
            let members = waiting.entry(topic.clone()).or_default();
            members.push(Arc::downgrade(&notice));
        }
        notice
    }

    /// Wakes the members that wait for any of these topics, given in record order.
    pub fn wake<'a>(&self, topics: impl Iterator<Item = &'a str>) {
        let mut last = None;
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for topic in topics {
            if last.replace(topic) == Some(topic) {
                continue;
            }
            if let Some(members) = waiting.get_mut(topic) {
                members.retain(|member| {
                    let member = member.upgrade();
                    member.inspect(|notice| notice.notify_one()).is_some()
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Waker},
    };

    use super::*;

    fn is_woken(member: &Notify) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        pin!(member.notified()).poll(&mut context).is_ready()
    }

    #[test]
    fn a_member_is_woken_once_and_by_its_own_topics_only() {
        let wakes = Wakes::default();
        let member = |topics: &[&str]| {
            let topics: Vec<String> = topics.iter().map(|topic| (*topic).to_owned()).collect();
            wakes.register(&topics)
        };
        let (ours, same, other) = (member(&["a", "b"]), member(&["b"]), member(&["c"]));
        // Published before any member waits.
        wakes.wake(["a", "a", "b"].into_iter());
        assert!(is_woken(&ours) && is_woken(&same));
        assert!(!is_woken(&ours) && !is_woken(&other));
        wakes.wake(["a"].into_iter());
        assert!(is_woken(&ours) && !is_woken(&same));
        drop(ours);
        wakes.wake(["a", "b"].into_iter());
        assert!(is_woken(&same));
        let known = wakes.0.lock().unwrap();
        assert_eq!((known["a"].len(), known["b"].len()), (0, 1));
    }
}
