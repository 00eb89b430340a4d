//! The caller of a request: subject, user id and roles, set by the access layer.
//!
//! Invariant: every handler has a [`Caller`] in its request extensions, because the port and an
//! in-process [`crate::Channel`] use the same layer. Rules: D32; rows R332, R333.

use axum::extract::FromRequestParts;
use http::request::Parts;
use tonic::Status;

use crate::{Approved, json::HttpError, status};

/// One role of D32. `Auditor` reads everything and changes nothing; `Service` is a platform
/// service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    Investor,
    Trader,
    Issuer,
    Operator,
    Treasury,
    Compliance,
    MarketSupervisor,
    Auditor,
    Service,
}

impl Role {
    pub const ALL: [Role; 9] = [
        Role::Investor,
        Role::Trader,
        Role::Issuer,
        Role::Operator,
        Role::Treasury,
        Role::Compliance,
        Role::MarketSupervisor,
        Role::Auditor,
        Role::Service,
    ];

    /// Roles that act only for their own user id, which their credential carries.
    pub const OWN: [Role; 3] = [Role::Investor, Role::Trader, Role::Issuer];

    /// Roles that order for their own user id, by call and in trading sessions (R333).
    pub const TRADING: [Role; 2] = [Role::Investor, Role::Trader];

    /// Kebab-case name, as used in tokens and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Investor => "investor",
            Role::Trader => "trader",
            Role::Issuer => "issuer",
            Role::Operator => "operator",
            Role::Treasury => "treasury",
            Role::Compliance => "compliance",
            Role::MarketSupervisor => "market-supervisor",
            Role::Auditor => "auditor",
            Role::Service => "service",
        }
    }

    pub fn parse(name: &str) -> Option<Role> {
        Role::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// A set of roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles(u16);

impl Roles {
    pub const NONE: Roles = Roles(0);

    pub const fn of(roles: &[Role]) -> Roles {
        let mut bits = 0;
        let mut index = 0;
        while index < roles.len() {
            bits |= 1 << roles[index] as u16;
            index += 1;
        }
        Roles(bits)
    }

    pub const fn union(self, other: Roles) -> Roles {
        Roles(self.0 | other.0)
    }

    pub const fn intersection(self, other: Roles) -> Roles {
        Roles(self.0 & other.0)
    }

    pub const fn without(self, role: Role) -> Roles {
        Roles(self.0 & !(1 << role as u16))
    }

    pub const fn contains(self, role: Role) -> bool {
        self.0 & (1 << role as u16) != 0
    }

    pub const fn intersects(self, other: Roles) -> bool {
        self.0 & other.0 != 0
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn iter(self) -> impl Iterator<Item = Role> {
        Role::ALL
            .into_iter()
            .filter(move |role| self.contains(*role))
    }
}

impl FromIterator<Role> for Roles {
    fn from_iter<I: IntoIterator<Item = Role>>(roles: I) -> Self {
        roles
            .into_iter()
            .fold(Roles::NONE, |set, role| set.union(Roles::of(&[role])))
    }
}

/// The authenticated caller of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Subject of the credential, for logs and audit.
    pub subject: String,
    /// The only user an investor, trader or issuer may act for. `None` for staff and services.
    pub user_id: Option<String>,
    /// In a handler, only the credential's roles that admit the called method: a read-only role
    /// never widens a write.
    pub roles: Roles,
    /// The persons of an approved call that the approvals service makes.
    pub approval: Option<Approved>,
}

impl Caller {
    /// True if one of [`Caller::roles`] acts on any user: staff or a service.
    pub fn acts_for_any_user(&self) -> bool {
        let own = Roles::of(&Role::OWN);
        self.roles.iter().any(|role| !own.contains(role))
    }

    /// PERMISSION_DENIED unless the caller has one of the roles.
    pub fn require(&self, any_of: &[Role]) -> Result<(), Status> {
        if self.roles.intersects(Roles::of(any_of)) {
            return Ok(());
        }
        Err(status::permission_denied(
            "ROLE_REQUIRED",
            "Caller lacks the role for this operation",
        ))
    }

    /// True for a platform service, whose calls need no approval. In a handler of such a call, only
    /// for a credential with no other role.
    pub fn is_service(&self) -> bool {
        self.roles.contains(Role::Service)
    }

    /// True for a platform service that acts by itself: not for an approved call, which is the act
    /// of two persons, nor for a credential with a further role, which is a person's.
    pub fn acts_by_itself(&self) -> bool {
        self.roles == Roles::of(&[Role::Service]) && self.approval.is_none()
    }

    /// True if the caller sees the whole account of this user at the bank: the user itself, the
    /// staff and services that pay to it or check it, and auditors (D32). Others see it masked.
    pub fn sees_bank_account_of(&self, user_id: &str) -> bool {
        let duty = [
            Role::Operator,
            Role::Treasury,
            Role::Compliance,
            Role::Auditor,
            Role::Service,
        ];
        self.user_id.as_deref() == Some(user_id) || self.roles.intersects(Roles::of(&duty))
    }

    /// The named person of a credential, able to request and approve calls (D32). `None` for a
    /// service and for a credential without a name, whose subject is its list of roles.
    pub fn person(&self) -> Option<&str> {
        let is_role = |name: &str| Role::parse(name).is_some();
        let is_nameless = self.subject.split('+').all(is_role);
        (!self.is_service() && !is_nameless).then_some(self.subject.as_str())
    }

    /// FAILED_PRECONDITION unless the caller is a service: a person's call of this method needs an
    /// approval (D32).
    pub fn require_approval(&self, method: &str) -> Result<(), Status> {
        match self.is_service() {
            true => Ok(()),
            false => Err(status::approval_required(method)),
        }
    }

    /// PERMISSION_DENIED unless the caller is this user. Staff and services are refused too.
    pub fn require_self(&self, user_id: &str) -> Result<(), Status> {
        let is_own = self.roles.intersects(Roles::of(&Role::OWN));
        if is_own && self.user_id.as_deref() == Some(user_id) {
            return Ok(());
        }
        Err(foreign_user())
    }

    /// PERMISSION_DENIED unless the caller may act for this user: the own user id, or any user for
    /// staff and services (D32).
    pub fn require_user(&self, user_id: &str) -> Result<(), Status> {
        if self.acts_for_any_user() || self.user_id.as_deref() == Some(user_id) {
            return Ok(());
        }
        Err(foreign_user())
    }
}

fn foreign_user() -> Status {
    status::permission_denied("FOREIGN_USER", "Caller may act only on its own user id")
}

/// The caller of a tonic request. UNAUTHENTICATED only if a route lacks the access layer.
pub fn caller<T>(request: &tonic::Request<T>) -> Result<&Caller, Status> {
    request
        .extensions()
        .get::<Caller>()
        .ok_or_else(missing_caller)
}

fn missing_caller() -> Status {
    status::unauthenticated("CREDENTIALS_REQUIRED", "Credentials are required")
}

/// Allows `caller: Caller` as an argument of HTTP reads.
impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts
            .extensions
            .get::<Caller>()
            .cloned()
            .ok_or_else(|| missing_caller().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(roles: &[Role], user_id: Option<&str>) -> Caller {
        Caller {
            subject: "test".into(),
            user_id: user_id.map(Into::into),
            roles: Roles::of(roles),
            approval: None,
        }
    }

    // rows: R333
    #[test]
    fn r333_user_roles_act_only_on_their_own_id() {
        let investor = of(&[Role::Investor], Some("u1"));
        assert!(investor.require_user("u1").is_ok());
        assert_eq!(
            investor.require_user("u2").unwrap_err().code(),
            tonic::Code::PermissionDenied
        );
        assert!(of(&[Role::Operator], None).require_user("u2").is_ok());
        assert!(of(&[Role::Service], None).require_user("u2").is_ok());
        assert!(of(&[Role::Trader], None).require_user("u2").is_err());
    }

    // rows: R333
    #[test]
    fn d32_a_person_has_a_name_and_a_service_is_none() {
        let named = |subject: &str, roles: &[Role]| {
            let subject = subject.to_owned();
            let caller = Caller {
                subject,
                ..of(roles, None)
            };
            caller.person().map(str::to_owned)
        };
        let operator = &[Role::Operator];
        assert_eq!(named("anna", operator), Some("anna".to_owned()));
        for nameless in ["operator", "operator+treasury", "market-supervisor"] {
            assert_eq!(named(nameless, operator), None, "{nameless}");
        }
        assert_eq!(named("anna", &[Role::Operator, Role::Service]), None);
        let service = of(&[Role::Service], None);
        assert!(service.require_approval("a.B/C").is_ok());
        let refused = of(operator, None).require_approval("/a.B/C").unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert_eq!(refused.message(), "This call needs an approval");
        let reason = status::reason(&refused);
        assert_eq!(reason.as_deref(), Some("APPROVAL_REQUIRED"));
    }

    // rows: R333
    #[test]
    fn r333_a_service_with_a_further_role_does_not_act_by_itself() {
        assert!(of(&[Role::Service], None).acts_by_itself());
        for role in Role::ALL {
            assert!(!of(&[role, Role::Operator, Role::Service], None).acts_by_itself());
        }
    }

    // rows: R333
    #[test]
    fn r333_only_the_user_and_staff_with_a_duty_see_a_bank_account() {
        let investor = of(&[Role::Investor], Some("u1"));
        assert!(investor.sees_bank_account_of("u1"));
        assert!(!investor.sees_bank_account_of("u2"));
        for role in [
            Role::Operator,
            Role::Treasury,
            Role::Compliance,
            Role::Auditor,
            Role::Service,
        ] {
            assert!(of(&[role], None).sees_bank_account_of("u1"), "{role:?}");
        }
        let supervisor = of(&[Role::MarketSupervisor], None);
        assert!(!supervisor.sees_bank_account_of("u1"));
        let both = of(&[Role::Investor, Role::MarketSupervisor], Some("u1"));
        assert!(both.sees_bank_account_of("u1") && !both.sees_bank_account_of("u2"));
    }

    #[test]
    fn role_names_round_trip_and_sets_hold_what_was_put_in() {
        for role in Role::ALL {
            assert_eq!(Role::parse(role.name()), Some(role));
            assert!(Roles::of(&[role]).contains(role));
        }
        assert_eq!(Roles::of(&Role::ALL).iter().count(), Role::ALL.len());
        assert!(
            of(&[Role::Auditor], None)
                .require(&[Role::Operator])
                .is_err()
        );
    }
}
