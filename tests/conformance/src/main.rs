//! Server under test of the official Connect conformance suite: serves the suite's service on the
//! platform's protocol layer.
//!
//! The runner starts the process, writes a length-prefixed `ServerCompatRequest` to stdin and reads
//! a `ServerCompatResponse` from stdout. It ends the process by a signal. `run.sh` in this crate's
//! folder runs the whole suite.

mod service;

use std::{
    io::{Read, Write},
    sync::Arc,
};

use prost::Message;
use rpc::contract::Contract;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

#[allow(clippy::all, dead_code, unused_qualifications)]
mod pb {
    include!(concat!(env!("OUT_DIR"), "/connectrpc.conformance.v1.rs"));
}

const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let request = read_request()?;
    let limit = match request.message_receive_limit {
        0 => rpc::MESSAGE_BYTES_MAX,
        bytes => bytes as usize,
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;

    let server = pb::conformance_service_server::ConformanceServiceServer::new(service::Service);
    let server = rpc::grpc_server!(server).max_decoding_message_size(limit);
    let app = rpc::serve::protocols(
        Arc::new(Contract::new(DESCRIPTORS)),
        Routes::new(server).into_axum_router(),
        limit,
    );
    write_response(&pb::ServerCompatResponse {
        host: address.ip().to_string(),
        port: address.port().into(),
        pem_cert: Vec::new(),
    })?;

    rpc::serve::listen(listener, app, CancellationToken::new()).await?;
    Ok(())
}

fn read_request() -> Result<pb::ServerCompatRequest, Box<dyn std::error::Error>> {
    let mut length = [0; 4];
    let mut stdin = std::io::stdin().lock();
    stdin.read_exact(&mut length)?;
    let mut bytes = vec![0; u32::from_be_bytes(length) as usize];
    stdin.read_exact(&mut bytes)?;
    Ok(pb::ServerCompatRequest::decode(&*bytes)?)
}

fn write_response(response: &pb::ServerCompatResponse) -> std::io::Result<()> {
    let bytes = response.encode_to_vec();
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&(bytes.len() as u32).to_be_bytes())?;
    stdout.write_all(&bytes)?;
    stdout.flush()
}
