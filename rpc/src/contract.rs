//! Descriptors of the served methods, by path: what Connect JSON, HTTP reads and the role table look up.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use prost_reflect::{DescriptorPool, MessageDescriptor};

/// One method, as the descriptors have it.
#[derive(Clone, Debug)]
pub struct Method {
    pub input: MessageDescriptor,
    pub output: MessageDescriptor,
    pub client_streaming: bool,
    pub server_streaming: bool,
    /// `idempotency_level = NO_SIDE_EFFECTS`: may be called with Connect GET.
    pub reads_only: bool,
}

/// A set of services that can be served.
#[derive(Debug)]
pub struct Contract {
    pool: DescriptorPool,
    methods: HashMap<String, Method>,
}

impl Contract {
    /// Indexes every method of an encoded `FileDescriptorSet`.
    ///
    /// # Panics
    /// Our own bug: descriptors compiled into the binary do not decode.
    pub fn new(descriptor_set: &[u8]) -> Self {
        let pool = DescriptorPool::decode(descriptor_set).expect("compiled-in descriptors decode");
        let methods = pool
            .services()
            .flat_map(|service| {
                let name = service.full_name().to_owned();
                service
                    .methods()
                    .map(|method| {
                        let level = method
                            .method_descriptor_proto()
                            .options
                            .as_ref()
                            .map_or(0, |options| options.idempotency_level.unwrap_or(0));
                        let info = Method {
                            input: method.input(),
                            output: method.output(),
                            client_streaming: method.is_client_streaming(),
                            server_streaming: method.is_server_streaming(),
                            reads_only: level
                                == prost_types::method_options::IdempotencyLevel::NoSideEffects
                                    as i32,
                        };
                        (format!("/{name}/{}", method.name()), info)
                    })
                    .collect::<Vec<_>>()
            })
            .collect();
        Contract { pool, methods }
    }

    /// The platform's own contract.
    pub fn platform() -> Arc<Contract> {
        static PLATFORM: LazyLock<Arc<Contract>> =
            LazyLock::new(|| Arc::new(Contract::new(proto::FILE_DESCRIPTOR_SET)));
        PLATFORM.clone()
    }

    pub fn pool(&self) -> &DescriptorPool {
        &self.pool
    }

    /// The method at `/package.Service/Method`.
    pub fn method(&self, path: &str) -> Option<&Method> {
        self.methods.get(path)
    }

    /// Every path, in no particular order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.methods.keys().map(String::as_str)
    }
}
