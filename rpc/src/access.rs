//! Access layer: authentication and authorization of RPC and HTTP reads, on the port and in process
//! (D32; rows R332, R333).
//!
//! The path determines the rule: open paths pass, RPC paths need a role of their row in [`roles`],
//! and every other path is a staff read. Denied by default: a path of the contract without a row is
//! refused, and an RPC path outside it does not exist. Refusals use the protocol of the request.
//! A person's call of a method that always needs an approval is refused here (D32). A credential
//! with the role of a service beside others is a person's there. The approvals service alone names
//! the approval that a call executes ([`Approved`]).
//!
//! Invariant: a handler sees only those roles of its caller that admit the called method.

use axum::{
    extract::{Request, State},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Method, header::AUTHORIZATION};
use tonic::{Status, service::Routes};

use crate::{
    Approved, Caller, MESSAGE_BYTES_MAX, Role, Roles, connect,
    contract::Contract,
    json::HttpError,
    observe,
    roles::{self, Rule, When},
    status,
};

/// Subject of the approvals service.
const APPROVALS: &str = "approvals";

/// Checks credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Authenticator {
    /// Ready-made sandbox tokens: `sandbox.<role>` for staff and services, `sandbox.<role>.<name>`
    /// for a named member of staff, `sandbox.<role>.<user_id>` for investor, trader and issuer;
    /// several roles as `a+b`; `sandbox.service.approvals` for the approvals service. They prove no
    /// identity: for local use only.
    Sandbox,
}

impl Authenticator {
    /// The caller of a bearer credential. UNAUTHENTICATED for an invalid one.
    pub fn authenticate(&self, credential: &str) -> Result<Caller, Status> {
        match self {
            Authenticator::Sandbox => sandbox_caller(credential).ok_or_else(bad_credentials),
        }
    }

    fn caller_of(&self, headers: &HeaderMap) -> Result<Caller, Status> {
        let Some(value) = headers.get(AUTHORIZATION) else {
            return Err(status::unauthenticated(
                "CREDENTIALS_REQUIRED",
                "Credentials are required",
            ));
        };
        let (scheme, credential) = value
            .to_str()
            .ok()
            .and_then(|value| value.split_once(' '))
            .ok_or_else(bad_credentials)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(bad_credentials());
        }
        self.authenticate(credential.trim())
    }

    /// `Ok(None)` = an open path without a valid credential, `Ok(Some)` = the admitted caller.
    fn decide(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Option<Caller>, Status> {
        let rule = roles::rule(path);
        if rule == Rule::Open || *method == Method::OPTIONS {
            // On an open path a valid credential identifies the caller; a bad one is ignored.
            let caller = self.caller_of(headers).ok();
            return Ok(caller.map(|caller| admitted(caller, Roles::NONE)));
        }
        let mut caller = self.caller_of(headers)?;
        let approval = roles::approval(path);
        if approval.is_some() {
            caller = person_or_service(caller, headers);
        }
        match rule {
            Rule::AnyOf(allowed) if allowed.intersects(caller.roles) => {
                let caller = admitted(caller, allowed);
                if approval.is_some_and(|row| row.when == When::Always) {
                    caller.require_approval(path)?;
                }
                Ok(Some(caller))
            }
            Rule::Open | Rule::AnyOf(_) | Rule::Denied => Err(status::permission_denied(
                "ROLE_REQUIRED",
                "Caller lacks the role for this operation",
            )),
            Rule::Unknown => Err(status::unimplemented("Unknown method")),
        }
    }
}

/// The caller of a method that needs an approval. With the role of a service beside others it is a
/// person, who must not act alone. The approvals service has both persons as its subject.
fn person_or_service(caller: Caller, headers: &HeaderMap) -> Caller {
    if caller.roles != Roles::of(&[Role::Service]) {
        return Caller {
            roles: caller.roles.without(Role::Service),
            ..caller
        };
    }
    let is_approvals = caller.subject == APPROVALS;
    match Approved::read(headers).filter(|_| is_approvals) {
        Some(approved) => Caller {
            subject: approved.subject(),
            approval: Some(approved),
            ..caller
        },
        None => caller,
    }
}

/// The caller with only the roles that admit the method.
fn admitted(caller: Caller, allowed: Roles) -> Caller {
    Caller {
        roles: caller.roles.intersection(allowed),
        ..caller
    }
}

fn bad_credentials() -> Status {
    status::unauthenticated("CREDENTIALS_INVALID", "Credentials are not valid")
}

fn sandbox_caller(credential: &str) -> Option<Caller> {
    let mut parts = credential.splitn(3, '.');
    if parts.next() != Some("sandbox") {
        return None;
    }
    let names = parts.next()?;
    let roles: Roles = names
        .split('+')
        .map(Role::parse)
        .collect::<Option<Vec<_>>>()?
        .into_iter()
        .collect();
    let name = parts.next();
    let needs_user = roles.intersects(Roles::of(&Role::OWN));
    let well_formed = |id: &str| !id.is_empty() && id.len() <= 128 && !id.contains(':');
    match name {
        Some(id) if needs_user && well_formed(id) => Some(Caller {
            subject: id.to_owned(),
            user_id: Some(id.to_owned()),
            roles,
            approval: None,
        }),
        Some(name) if !needs_user && is_person_name(name) && !roles.contains(Role::Service) => {
            Some(Caller {
                subject: name.to_owned(),
                user_id: None,
                roles,
                approval: None,
            })
        }
        Some(APPROVALS) if roles == Roles::of(&[Role::Service]) => Some(Caller {
            subject: APPROVALS.to_owned(),
            user_id: None,
            roles,
            approval: None,
        }),
        None if !needs_user => Some(Caller {
            subject: names.to_owned(),
            user_id: None,
            roles,
            approval: None,
        }),
        _ => None,
    }
}

/// Name of a member of staff. One spelling per person: no upper case. A role is no name, since the
/// subject of a token without a name is its roles.
fn is_person_name(name: &str) -> bool {
    let is_plain =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain) && Role::parse(name).is_none()
}

/// Wraps RPC routes in the access and observation layers, for calls in process:
/// `slot.fill(rpc::with_auth(..))`.
pub fn with_auth(routes: Routes, auth: &Authenticator) -> Routes {
    let bounds = observe::Bounds {
        contract: Contract::platform(),
        message_bytes_max: MESSAGE_BYTES_MAX,
    };
    let router = routes
        .into_axum_router()
        .layer(from_fn_with_state(bounds, observe::observe))
        .layer(from_fn_with_state(auth.clone(), check));
    Routes::from(router).prepare()
}

/// The access layer.
pub(crate) async fn check(
    State(auth): State<Authenticator>,
    mut request: Request,
    next: Next,
) -> Response {
    // The caller comes from the credential alone: drop any that the request already has.
    request.extensions_mut().remove::<Caller>();
    let path = request.uri().path();
    match auth.decide(request.method(), path, request.headers()) {
        Ok(caller) => {
            if let Some(caller) = caller {
                request.extensions_mut().insert(caller);
            }
            next.run(request).await
        }
        Err(status) => {
            observe::refused(path, &status);
            if roles::is_rpc_path(path) {
                connect::refusal(request.method(), request.headers(), status)
            } else {
                HttpError::from(status).into_response()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R332
    #[test]
    fn r332_sandbox_tokens_are_read_strictly() {
        let auth = Authenticator::Sandbox;
        let trader = auth.authenticate("sandbox.investor+trader.u-1.x").unwrap();
        assert_eq!(trader.user_id.as_deref(), Some("u-1.x"));
        assert!(trader.roles.contains(Role::Trader) && trader.roles.contains(Role::Investor));
        assert!(auth.authenticate("sandbox.market-supervisor").is_ok());
        for token in ["sandbox.operator.anna", "sandbox.treasury+compliance.anna"] {
            let anna = auth.authenticate(token).unwrap();
            assert_eq!(anna.person(), Some("anna"), "one person with two tokens");
            assert_eq!(anna.user_id, None);
        }
        let approvals = auth.authenticate("sandbox.service.approvals").unwrap();
        assert_eq!(approvals.subject, APPROVALS);
        for bad in [
            "",
            "sandbox",
            "sandbox.",
            "sandbox.root",
            "sandbox.investor",
            "sandbox.investor.",
            "sandbox.operator.",
            "sandbox.operator.Anna",
            "sandbox.operator.treasury",
            "sandbox.service.anna",
            "sandbox.operator+service.anna",
            "sandbox.operator+service.approvals",
            "sandbox.investor+root.u1",
            "sandbox.investor.a:b",
            "other.operator",
        ] {
            let refused = auth.authenticate(bad).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::Unauthenticated, "{bad}");
        }
    }

    // rows: R333
    #[test]
    fn r333_a_role_counts_only_where_it_admits_the_method() {
        let auth = Authenticator::Sandbox;
        let decide = |path: &str, token: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
            let caller = auth.decide(&Method::POST, path, &headers).unwrap();
            caller.expect("a caller")
        };
        let place = "/dfa.market.v1.MarketService/PlaceOrder";
        let read = "/dfa.market.v1.MarketService/GetOrder";
        for token in ["sandbox.investor+auditor.u1", "sandbox.auditor+investor.u1"] {
            let writes = decide(place, token);
            assert_eq!(writes.roles, Roles::of(&[Role::Investor]), "{token}");
            assert!(!writes.acts_for_any_user());
            assert!(writes.require_user("u1").is_ok());
            assert!(writes.require_user("u2").is_err());
            let reads = decide(read, token);
            assert!(reads.acts_for_any_user() && reads.require_user("u2").is_ok());
        }
        assert!(!decide(place, "sandbox.investor+operator.u1").acts_for_any_user());
        assert!(decide("/holds", "sandbox.investor+auditor.u1").acts_for_any_user());
        assert_eq!(decide("/health", "sandbox.operator").roles, Roles::NONE);
    }

    // rows: R333
    #[test]
    fn d32_only_the_approvals_service_names_the_approval_that_it_executes() {
        let auth = Authenticator::Sandbox;
        let subject = |token: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
            let approved = Approved {
                approval_id: "a-1".to_owned(),
                requester: "anna".to_owned(),
                approver: "boris".to_owned(),
            };
            approved.write(&mut headers).unwrap();
            let path = "/dfa.market.v1.MarketService/SetTradingPhase";
            let caller = auth.decide(&Method::POST, path, &headers).unwrap();
            let caller = caller.expect("a caller");
            // An approved call is no act of the service that makes it.
            let is_named = caller.approval == Some(approved);
            assert_eq!(is_named, caller.is_service() && !caller.acts_by_itself());
            caller.subject
        };
        assert_eq!(
            subject("sandbox.service.approvals"),
            "anna, approved by boris (approval a-1)"
        );
        for (forger, own) in [
            ("sandbox.service", "service"),
            ("sandbox.operator+service", "operator+service"),
            ("sandbox.operator", "operator"),
            ("sandbox.operator.anna", "anna"),
            ("sandbox.operator.approvals", "approvals"),
            ("sandbox.operator+trader+service.approvals", "approvals"),
        ] {
            assert_eq!(subject(forger), own, "{forger}");
        }
    }

    // rows: R333
    #[test]
    fn d32_a_person_with_the_role_of_a_service_is_a_person() {
        let auth = Authenticator::Sandbox;
        let decide = |token: &str, method: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
            let path = format!("/dfa.market.v1.MarketService/{method}");
            auth.decide(&Method::POST, &path, &headers)
        };
        let refusal = |token: &str| {
            let refused = decide(token, "ConfirmClock").unwrap_err();
            status::reason(&refused).unwrap_or_default()
        };
        let desk = "sandbox.operator+treasury+compliance+market-supervisor+auditor+service";
        for person in [desk, "sandbox.operator+service", "sandbox.operator.anna"] {
            assert_eq!(refusal(person), "APPROVAL_REQUIRED", "{person}");
            // The handler decides, with this caller.
            let caller = decide(person, "SetTradingPhase").unwrap();
            assert!(!caller.expect("a caller").is_service(), "{person}");
        }
        assert_eq!(refusal("sandbox.treasury+service"), "ROLE_REQUIRED");
        for service in ["sandbox.service", "sandbox.service.approvals"] {
            let caller = decide(service, "ConfirmClock").unwrap();
            assert!(caller.expect("a caller").is_service(), "{service}");
        }
        // Where no approval is needed, nothing changes.
        let caller = decide("sandbox.operator+service", "CancelOrder").unwrap();
        assert!(caller.expect("a caller").is_service());
    }

    // rows: R332 R333
    #[test]
    fn r333_paths_decide_and_deny_by_default() {
        let auth = Authenticator::Sandbox;
        let decide = |path: &str, token: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(token) = token {
                headers.insert(AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
            }
            auth.decide(&Method::POST, path, &headers)
                .map_err(|status| status.code())
        };
        use tonic::Code::{PermissionDenied, Unauthenticated, Unimplemented};
        let place = "/dfa.market.v1.MarketService/PlaceOrder";
        assert_eq!(decide(place, None), Err(Unauthenticated));
        assert_eq!(
            decide(place, Some("sandbox.auditor")),
            Err(PermissionDenied)
        );
        assert!(decide(place, Some("sandbox.trader.u1")).is_ok());
        for open in ["/health", "/livez", "/readyz", "/metrics", "/webhook"] {
            assert_eq!(decide(open, None), Ok(None), "{open}");
        }
        assert_eq!(decide("/holds", None), Err(Unauthenticated));
        assert_eq!(
            decide("/holds", Some("sandbox.trader.u1")),
            Err(PermissionDenied)
        );
        assert!(decide("/holds", Some("sandbox.auditor")).is_ok());
        assert_eq!(
            decide(
                "/dfa.market.v1.MarketService/Nothing",
                Some("sandbox.operator")
            ),
            Err(Unimplemented)
        );
    }
}
