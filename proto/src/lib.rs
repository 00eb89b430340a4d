//! The platform's contracts in Rust: generated messages, service traits, clients, descriptor set.
//!
//! The only rules here are those of the form of requests ([`checks`]). Conversions between messages
//! and `types` are in [`convert`], so that no other crate parses a number of a message.
//!
//! The schemas are in `proto/dfa/<service>/v1`. In `v1` only additions are allowed (D01); `cargo
//! xtask proto` lints them and compares them with the committed image `proto/baseline.binpb`.

/// Every schema with its imports and comments, as an encoded `google.protobuf.FileDescriptorSet`.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Path and content of every schema, and of the buf configuration that generates clients from them.
pub const SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

macro_rules! package {
    ($name:ident) => {
        pub mod $name {
            pub mod v1 {
                #![allow(clippy::all, missing_docs, unused_qualifications)]
                include!(concat!(
                    env!("OUT_DIR"),
                    "/dfa.",
                    stringify!($name),
                    ".v1.rs"
                ));
            }
        }
    };
}

package!(common);
package!(ledger);
package!(cfa);
package!(payments);
package!(market);
package!(identity);
package!(chain);
package!(audit);
package!(settlement);
package!(approvals);
package!(sandbox);

pub mod checks;
pub mod convert;
pub mod times;
pub mod unary;
