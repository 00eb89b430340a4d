//! Faults of the calls that the service makes to other services.

use std::sync::{Arc, Mutex};

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use tonic::service::Routes;

use crate::world::Random;

/// Fails calls at random between `start` and `stop`. Clones share the state.
#[derive(Clone, Default)]
pub struct Faults(Arc<Mutex<Plan>>);

#[derive(Default)]
struct Plan {
    random: Option<Random>,
    calls_lost: u32,
    answers_lost: u32,
    /// Paths of all calls, in order.
    calls: Vec<String>,
}

enum Fault {
    None,
    /// The call does not arrive.
    CallLost,
    /// The call takes effect; its answer is lost.
    AnswerLost,
}

impl Faults {
    pub fn start(&self, seed: u64) {
        self.plan().random = Some(Random(seed));
    }

    pub fn stop(&self) {
        self.plan().random = None;
    }

    /// Number of lost calls and of lost answers.
    pub fn lost(&self) -> (u32, u32) {
        let plan = self.plan();
        (plan.calls_lost, plan.answers_lost)
    }

    /// Removes and returns the method names of the calls to a service.
    pub fn take_calls(&self, service: &str) -> Vec<String> {
        let calls = std::mem::take(&mut self.plan().calls);
        let of_service = calls.iter().filter_map(|path| {
            let (called, method) = path.trim_start_matches('/').split_once('/')?;
            (called == service).then(|| method.to_owned())
        });
        of_service.collect()
    }

    fn plan(&self) -> std::sync::MutexGuard<'_, Plan> {
        self.0.lock().expect("no panic with the lock")
    }

    /// Every second call fails, half of these after it took effect.
    fn next(&self) -> Fault {
        let mut plan = self.plan();
        match plan.random.as_mut().map(|random| random.below(4)) {
            Some(0) => {
                plan.calls_lost += 1;
                Fault::CallLost
            }
            Some(1) => {
                plan.answers_lost += 1;
                Fault::AnswerLost
            }
            _ => Fault::None,
        }
    }

    /// The routes with these faults.
    pub fn before(&self, routes: Routes) -> Routes {
        let layer = from_fn_with_state(self.clone(), pass);
        Routes::from(routes.into_axum_router().layer(layer))
    }
}

async fn pass(State(faults): State<Faults>, request: Request, next: Next) -> Response {
    let lost = || rpc::status::unavailable("Network", 1).into_http();
    let path = request.uri().path().to_owned();
    faults.plan().calls.push(path);
    match faults.next() {
        Fault::None => next.run(request).await,
        Fault::CallLost => lost(),
        Fault::AnswerLost => {
            next.run(request).await;
            lost()
        }
    }
}
