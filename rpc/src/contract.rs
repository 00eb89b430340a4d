//! Descriptors of the served methods by path, for Connect JSON, HTTP reads and the role table.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use prost_reflect::{DescriptorPool, MessageDescriptor, MethodDescriptor};
use prost_types::method_options::IdempotencyLevel;

/// One method of the descriptors.
#[derive(Clone, Debug)]
pub struct Method {
    pub input: MessageDescriptor,
    pub output: MessageDescriptor,
    pub client_streaming: bool,
    pub server_streaming: bool,
    /// `idempotency_level = NO_SIDE_EFFECTS`: may be called with Connect GET.
    pub reads_only: bool,
}

impl Method {
    fn of(method: &MethodDescriptor) -> Self {
        let descriptor = method.method_descriptor_proto();
        let options = descriptor.options.as_ref();
        Method {
            input: method.input(),
            output: method.output(),
            client_streaming: method.is_client_streaming(),
            server_streaming: method.is_server_streaming(),
            reads_only: options.is_some_and(|options| {
                options.idempotency_level() == IdempotencyLevel::NoSideEffects
            }),
        }
    }
}

/// Descriptors of everything a port serves, and of the error details in its refusals.
pub(crate) const PORT_SETS: [&[u8]; 5] = [
    proto::FILE_DESCRIPTOR_SET,
    tonic_types::pb::FILE_DESCRIPTOR_SET,
    tonic_health::pb::FILE_DESCRIPTOR_SET,
    tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
    tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
];

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
    /// Bug: descriptors compiled into the binary do not decode.
    pub fn new(descriptor_set: &[u8]) -> Self {
        Self::of_sets(&[descriptor_set], |_| true)
    }

    /// The services of one port: these services of the platform, health and reflection.
    pub fn of_port(services: &[String]) -> Self {
        let is_served = |name: &str| services.iter().any(|served| served == name);
        Self::of_sets(&PORT_SETS, |name| {
            is_served(name) || name.starts_with("grpc.reflection.")
        })
    }

    fn of_sets(descriptor_sets: &[&[u8]], is_served: impl Fn(&str) -> bool) -> Self {
        let mut pool = DescriptorPool::new();
        for set in descriptor_sets {
            pool.decode_file_descriptor_set(*set)
                .expect("compiled-in descriptors decode");
        }
        let mut methods = HashMap::new();
        for service in pool
            .services()
            .filter(|service| is_served(service.full_name()))
        {
            for method in service.methods() {
                let path = format!("/{}/{}", service.full_name(), method.name());
                methods.insert(path, Method::of(&method));
            }
        }
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

    /// All paths, unordered.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.methods.keys().map(String::as_str)
    }
}
