//! Call rates of each caller (D33): writes and reads per second, with a burst of one second.
//!
//! | call | limit |
//! |---|---|
//! | of a platform service, or without a caller | none |
//! | of a method that only reads, or an HTTP read | [`CallRateConfig::reads_per_s`] |
//! | any other | [`CallRateConfig::writes_per_s`] |
//!
//! A call that may reduce risk ([`REDUCING`]) counts as a write. Beyond the rate it passes with the
//! mark [`OverRate`]. Its service may refuse it if it would reduce nothing (`design.md` 5).
//!
//! The layer runs after the access layer, on ports only: calls in process come from services. Ports
//! that share one [`CallRates`] share the rates. Cost: memory for at most two generations of
//! [`CALLERS_MAX`] callers, and one lock per call.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::Method;
use serde::{Deserialize, Serialize};
use service_kit::{
    clock::monotonic_ns,
    rate::{Rate, SECOND_NS},
};
use tonic::Status;

use crate::{Caller, Role, connect, contract::Contract, json::HttpError, observe, roles, status};

/// Counter of calls refused for their caller's rate, label `kind`: `read` or `write`.
pub const REFUSED: &str = "rpc_calls_over_rate_total";
/// Maximum of callers remembered per generation. Further callers share the rates of one.
const CALLERS_MAX: usize = 16_384;

/// Calls that reduce their caller's risk, and calls by which staff freezes, blocks and halts at
/// once (`design.md` 10). Lifting a freeze, block or halt by the same call needs an approval.
const REDUCING: [&str; 11] = [
    "/dfa.market.v1.MarketService/CancelOrder",
    "/dfa.market.v1.MarketService/MassCancel",
    "/dfa.market.v1.MarketService/SetKillSwitch",
    "/dfa.market.v1.MarketService/SetTradingPhase",
    "/dfa.ledger.v1.LedgerService/ReleaseHold",
    "/dfa.ledger.v1.LedgerService/SetSubAccountStatus",
    "/dfa.identity.v1.IdentityService/BlockUser",
    "/dfa.cfa.v1.CfaRegistryService/SetRedemptionBlock",
    "/dfa.cfa.v1.CfaRegistryService/FreezeUnits",
    "/dfa.cfa.v1.CfaRegistryService/CancelSubscription",
    "/dfa.cfa.v1.CfaRegistryService/CancelOffer",
];

/// Calls per second and caller on the RPC ports; 0 = no limit. Services have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CallRateConfig {
    /// Calls that may change something. Those that reduce risk, or by which staff blocks, freezes
    /// and halts, pass beyond the rate too.
    pub writes_per_s: u32,
    /// Calls that only read, and HTTP reads.
    pub reads_per_s: u32,
}

impl CallRateConfig {
    pub const NONE: Self = Self {
        writes_per_s: 0,
        reads_per_s: 0,
    };
}

impl Default for CallRateConfig {
    fn default() -> Self {
        Self {
            writes_per_s: 50,
            reads_per_s: 500,
        }
    }
}

/// The rates of all callers of the ports that share it. Clones share them.
#[derive(Clone, Debug)]
pub struct CallRates(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: CallRateConfig,
    callers: Mutex<Callers>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write,
    Read,
}

impl Kind {
    fn of(method: &Method, path: &str) -> Self {
        let only_reads = match Contract::platform().method(path) {
            Some(method) => method.reads_only,
            None => method.is_safe(),
        };
        if only_reads { Self::Read } else { Self::Write }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

impl CallRates {
    pub fn new(config: CallRateConfig) -> Self {
        Self(Arc::new(Shared {
            config,
            callers: Mutex::new(Callers::new(CALLERS_MAX)),
        }))
    }

    /// Counts a call against its caller's rate.
    ///
    /// # Errors
    /// The caller's rate of such calls is used up at `now_ns`.
    fn check(&self, request: &Request, now_ns: u64) -> Result<(), OverRate> {
        // On an open path a caller has no roles.
        let caller = request.extensions().get::<Caller>();
        let limited =
            |caller: &&Caller| !caller.roles.is_empty() && !caller.roles.contains(Role::Service);
        let Some(caller) = caller.filter(limited) else {
            return Ok(());
        };
        let kind = Kind::of(request.method(), request.uri().path());
        let config = &self.0.config;
        let per_second = match kind {
            Kind::Write => config.writes_per_s,
            Kind::Read => config.reads_per_s,
        };
        if per_second == 0 {
            return Ok(());
        }
        let callers = self.0.callers.lock();
        let mut callers = callers.unwrap_or_else(PoisonError::into_inner);
        let rate = &mut callers.rates(key_of(caller), now_ns)[kind as usize];
        if rate.admit(now_ns, per_second) {
            return Ok(());
        }
        Err(OverRate {
            kind,
            per_second,
            wait: Duration::from_nanos(rate.wait_ns(now_ns, per_second)),
        })
    }
}

impl Default for CallRates {
    fn default() -> Self {
        Self::new(CallRateConfig::default())
    }
}

/// Mark of a call beyond its caller's rate. Converts to the refusal: RESOURCE_EXHAUSTED with the
/// time after which a repeat is admitted.
#[derive(Clone, Copy, Debug)]
pub struct OverRate {
    kind: Kind,
    per_second: u32,
    wait: Duration,
}

impl OverRate {
    /// The mark of a call that may reduce risk; `None` within the rate.
    pub fn of<T>(request: &tonic::Request<T>) -> Option<Self> {
        request.extensions().get().copied()
    }
}

impl From<OverRate> for Status {
    fn from(over: OverRate) -> Self {
        let calls = match over.kind {
            Kind::Write => "calls that change something",
            Kind::Read => "calls that read",
        };
        let per_second = over.per_second;
        let text = format!("Too many calls: a caller may make {per_second} {calls} per second");
        let retry_ms = over.wait.as_nanos().div_ceil(1_000_000);
        let retry_ms = u64::try_from(retry_ms).unwrap_or(u64::MAX);
        ::metrics::counter!(REFUSED, "kind" => over.kind.name()).increment(1);
        status::resource_exhausted("RATE_LIMIT", text, retry_ms)
    }
}

/// (True for a user, subject). A user may have the same subject as staff, whose subjects are names
/// of roles or of persons.
type Key = (bool, String);

fn key_of(caller: &Caller) -> Key {
    (caller.user_id.is_some(), caller.subject.clone())
}

/// By [`Kind`].
type Rates = [Rate; 2];

/// The rates of recent callers, in two generations of at least a second. The older one is dropped
/// as a whole: its rates then equal new ones.
#[derive(Debug)]
struct Callers {
    recent: HashMap<Key, Rates>,
    earlier: HashMap<Key, Rates>,
    /// Start of the recent generation.
    since_ns: u64,
    callers_max: usize,
    /// Shared by the callers beyond `callers_max`.
    others: Rates,
}

impl Callers {
    fn new(callers_max: usize) -> Self {
        Self {
            recent: HashMap::new(),
            earlier: HashMap::new(),
            since_ns: 0,
            callers_max,
            others: Rates::default(),
        }
    }

    fn rates(&mut self, caller: Key, now_ns: u64) -> &mut Rates {
        if now_ns.saturating_sub(self.since_ns) >= SECOND_NS {
            self.earlier = std::mem::take(&mut self.recent);
            self.since_ns = now_ns;
        }
        if self.recent.len() >= self.callers_max && !self.recent.contains_key(&caller) {
            return &mut self.others;
        }
        let known = self.earlier.remove(&caller);
        let recent = self.recent.entry(caller);
        recent.or_insert_with(|| known.unwrap_or_default())
    }
}

/// The layer after the access layer. Refusals use the protocol of the request.
pub(crate) async fn layer(
    State(rates): State<CallRates>,
    mut request: Request,
    next: Next,
) -> Response {
    let Err(over) = rates.check(&request, monotonic_ns()) else {
        return next.run(request).await;
    };
    if REDUCING.contains(&request.uri().path()) {
        request.extensions_mut().insert(over);
        return next.run(request).await;
    }
    let status = Status::from(over);
    let path = request.uri().path();
    // No log line: a caller could fill the log.
    observe::count(path, &status);
    match roles::is_rpc_path(path) {
        true => connect::refusal(request.method(), request.headers(), status),
        false => HttpError::from(status).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tonic_types::StatusExt;

    use super::*;
    use crate::Roles;

    const PLACE: &str = "/dfa.market.v1.MarketService/PlaceOrder";
    const READ: &str = "/dfa.market.v1.MarketService/GetOrder";

    fn call(path: &str, subject: &str, roles: &[Role]) -> Request {
        let mut request = Request::post(path).body(Body::empty()).unwrap();
        let is_user = Roles::of(roles).intersects(Roles::of(&Role::OWN));
        request.extensions_mut().insert(Caller {
            subject: subject.to_owned(),
            user_id: is_user.then(|| subject.to_owned()),
            roles: Roles::of(roles),
            approval: None,
        });
        request
    }

    fn passed(rates: &CallRates, request: &Request, calls: u64, now_ns: u64) -> usize {
        let passes = |_: &u64| rates.check(request, now_ns).is_ok();
        (0..calls).filter(passes).count()
    }

    // rows: R341
    #[test]
    fn d33_each_caller_has_its_own_reads_and_writes() {
        let rates = CallRates::default();
        let hostile = call(PLACE, "u1", &[Role::Trader]);
        assert_eq!(passed(&rates, &hostile, 10_000, SECOND_NS), 50);
        let refused = Status::from(rates.check(&hostile, SECOND_NS).unwrap_err());
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(refused.message().contains("50 calls"), "{refused}");
        let retry = refused.get_details_retry_info().unwrap().retry_delay;
        assert_eq!(retry, Some(Duration::from_millis(20)));
        assert_eq!(passed(&rates, &hostile, 9, SECOND_NS + 20_000_000), 1);
        let read = call(READ, "u1", &[Role::Trader]);
        assert_eq!(passed(&rates, &read, 10_000, SECOND_NS), 500);
        // Neither another user nor staff with the same name.
        let others = [
            call(PLACE, "u2", &[Role::Trader]),
            call(PLACE, "u1", &[Role::Operator]),
        ];
        for other in &others {
            assert_eq!(passed(&rates, other, 60, SECOND_NS), 50);
        }
        let contract = Contract::platform();
        for path in REDUCING {
            assert!(!contract.method(path).expect(path).reads_only, "{path}");
        }
        let service = call(PLACE, "service", &[Role::Service]);
        assert_eq!(passed(&rates, &service, 10_000, SECOND_NS), 10_000);
    }

    // rows: R341
    #[test]
    fn d33_http_reads_count_as_reads_and_open_paths_do_not_count() {
        let rates = CallRates::new(CallRateConfig {
            writes_per_s: 0,
            reads_per_s: 2,
        });
        let mut read = call("/holds", "auditor", &[Role::Auditor]);
        *read.method_mut() = Method::GET;
        assert_eq!(passed(&rates, &read, 9, SECOND_NS), 2);
        let open = call("/health", "auditor", &[]);
        assert_eq!(passed(&rates, &open, 9, SECOND_NS), 9);
        let unlimited = call(PLACE, "u1", &[Role::Trader]);
        assert_eq!(passed(&rates, &unlimited, 9, SECOND_NS), 9);
    }

    #[test]
    fn callers_are_forgotten_only_when_that_changes_nothing() {
        let mut callers = Callers::new(2);
        let key = |name: &str| (true, name.to_owned());
        let mut admits = |name: &str, now_ns| callers.rates(key(name), now_ns)[0].admit(now_ns, 1);
        let start_ns = 10 * SECOND_NS;
        assert!(admits("a", start_ns) && !admits("a", start_ns));
        let next_ns = start_ns + SECOND_NS - 1;
        assert!(admits("b", next_ns));
        // Callers beyond the bound share one rate. Known callers keep theirs.
        assert!(admits("c", next_ns) && !admits("d", next_ns));
        assert!(!admits("b", next_ns));
        // In the next generation "b" is still known.
        let later_ns = start_ns + SECOND_NS;
        assert!(!admits("b", later_ns) && admits("b", next_ns + SECOND_NS));
        let end_ns = start_ns + 5 * SECOND_NS;
        admits("e", end_ns);
        admits("e", end_ns + SECOND_NS);
        assert!(callers.earlier.len() + callers.recent.len() <= 2);
    }
}
