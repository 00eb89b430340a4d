//! Doubles of services. `ServiceDoubles`: identity, payments and market, with one state.
//! `Registry`: the CFA service with its chain.

mod identity;
mod market;
mod payments;
mod registry;

use std::collections::{HashMap, HashSet, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use proto::audit::v1::AuditRecord;
use proto::common::v1::{Money, RequestContext};
use proto::identity::v1::CheckLimitsRequest;
use proto::identity::v1::identity_service_server::IdentityServiceServer;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use proto::market::v1::TradingHold;
use proto::market::v1::market_service_server::MarketServiceServer;
use proto::payments::v1::payments_service_server::PaymentsServiceServer;
use proto::payments::v1::{PaymentIntent, Payout};
use rpc::{Authenticator, LocalSlot};
use tokio::sync::Semaphore;
use tonic::service::Routes;
use tonic::{Response, Status};

pub use identity::{Reservation, TestUser};
pub use payments::Fault;
pub use registry::Registry;

/// Return type of a method of a generated service.
type Answer<'b, T> = Pin<Box<dyn Future<Output = Result<Response<T>, Status>> + Send + 'b>>;

/// Methods of a contract that a double does not implement, `name: Request => Response`. Written as
/// `async_trait` would expand them, because it does not process macros.
macro_rules! unimplemented_methods {
    ($($name:ident: $request:ty => $answer:ty),* $(,)?) => {
        $(fn $name<'a, 'b>(&'a self, _: Request<$request>) -> super::Answer<'b, $answer>
        where
            'a: 'b,
            Self: 'b,
        {
            Box::pin(async { Err(Status::unimplemented("not part of the test")) })
        })*
    };
}
use unimplemented_methods;

/// Serves routes in memory, with the sandbox's credentials, until the slot is cleared.
pub fn in_memory(routes: Routes) -> LocalSlot {
    let slot = LocalSlot::new();
    slot.fill(rpc::with_auth(routes, &Authenticator::Sandbox));
    slot
}

/// Identity, payments and market.
#[derive(Default)]
pub struct ServiceDoubles(Mutex<State>);

/// State of the doubles; their calls share one trail.
#[derive(Default)]
pub struct State {
    /// All calls in order, except `get_limits`, `get_payment_intent` and those of reservations.
    pub trail: Vec<String>,
    pub users: HashMap<String, TestUser>,
    /// Used for every user that is not in `users`; `None`: unknown users do not exist.
    pub default_user: Option<TestUser>,
    /// Reason with which every limit check is refused.
    pub limit_refusal: Option<String>,
    /// Recorded CheckLimits requests: see `take_limit_checks`.
    pub limit_checks: Vec<CheckLimitsRequest>,
    /// Number of `get_limits` calls, by user.
    pub limit_reads: HashMap<String, u32>,
    /// Users whose limits cannot be read.
    pub limits_unavailable: HashSet<String>,
    /// Daily limits in kopecks, by limit type. A type without an entry has no limit.
    pub daily_limits: HashMap<i32, i64>,
    /// By id.
    pub reservations: HashMap<String, Reservation>,
    /// True: reservations are neither made nor ended.
    pub reservations_unavailable: bool,
    /// By user: the profile is returned after the test has closed the semaphore, which has no
    /// permits.
    pub profile_latches: HashMap<String, Arc<Semaphore>>,
    /// Limit checks wait until the test closes this semaphore, which has no permits.
    pub limit_latch: Option<Arc<Semaphore>>,
    /// Faults of the next payments calls, one per call.
    pub faults: VecDeque<Fault>,
    /// Contexts of all payments calls.
    pub payments_contexts: Vec<RequestContext>,
    pub payments_unavailable: bool,
    /// True: payments refuses to release payouts.
    pub release_refused: bool,
    /// Audit records of payments, newest first.
    pub payments_records: Vec<AuditRecord>,
    pub intents: HashMap<String, PaymentIntent>,
    pub payouts: HashMap<String, Payout>,
    /// The only trading hold; `ledger` makes its money available.
    pub trading_hold: Option<TradingHold>,
    pub market_unavailable: bool,
    pub ledger: Option<LedgerServiceClient<rpc::Channel>>,
}

impl ServiceDoubles {
    pub fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.lock().expect("no test panics with the lock"))
    }

    pub fn trail(&self) -> Vec<String> {
        self.with(|state| state.trail.clone())
    }

    pub fn routes(self: &Arc<Self>) -> Routes {
        Routes::new(IdentityServiceServer::from_arc(self.clone()))
            .add_service(PaymentsServiceServer::from_arc(self.clone()))
            .add_service(MarketServiceServer::from_arc(self.clone()))
    }
}

/// The number of an amount, for the trail.
fn number(money: &Option<Money>) -> &str {
    let amount = money.as_ref().and_then(|money| money.amount.as_ref());
    amount.map_or("", |amount| &amount.value)
}
