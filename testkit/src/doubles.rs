//! Doubles of services.

use std::pin::Pin;

use rpc::{Authenticator, LocalSlot};
use tonic::service::Routes;
use tonic::{Response, Status};

/// What a method of a generated service returns.
pub type Answer<'b, T> = Pin<Box<dyn Future<Output = Result<Response<T>, Status>> + Send + 'b>>;

/// The calls of a contract that a double does not answer, `name: Request => Response`; written out as
/// `async_trait` would, since it does not look into macros.
#[macro_export]
macro_rules! unanswered {
    ($($name:ident: $ask:ty => $answer:ty),* $(,)?) => {
        $(fn $name<'a, 'b>(&'a self, _: tonic::Request<$ask>) -> $crate::Answer<'b, $answer>
        where
            'a: 'b,
            Self: 'b,
        {
            Box::pin(async { Err(tonic::Status::unimplemented("not part of the test")) })
        })*
    };
}

/// Serves routes in memory, with the sandbox's credentials, until the slot is cleared.
pub fn in_memory(routes: Routes) -> LocalSlot {
    let slot = LocalSlot::new();
    slot.fill(rpc::with_auth(routes, &Authenticator::Sandbox));
    slot
}
