//! A proxy between a ledger and its server that loses responses or cuts connections on request.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// `COMMIT` as a simple query of the protocol.
const COMMIT: &[u8] = b"Q\0\0\0\x0bCOMMIT\0";

/// A running proxy; clones share its state.
#[derive(Clone)]
pub struct Proxy {
    pub address: SocketAddr,
    drops_response: Arc<AtomicBool>,
    lost: Arc<AtomicUsize>,
    is_cut: watch::Sender<bool>,
}

impl Proxy {
    pub async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy {
            address: listener.local_addr().unwrap(),
            drops_response: Arc::default(),
            lost: Arc::default(),
            is_cut: watch::Sender::new(false),
        };
        let connections = proxy.clone();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                if !*connections.is_cut.borrow() {
                    let server = TcpStream::connect(&server).await.unwrap();
                    tokio::spawn(connections.clone().forward(client, server));
                }
            }
        });
        proxy
    }

    /// Forwards the next commit, then closes the connection instead of forwarding the response.
    pub fn drop_next_commit_response(&self) {
        self.drops_response.store(true, Ordering::SeqCst);
    }

    /// Number of lost responses.
    pub fn lost(&self) -> usize {
        self.lost.load(Ordering::SeqCst)
    }

    /// Closes every connection, and every new one until [`Self::restore`].
    pub fn cut(&self) {
        self.is_cut.send_replace(true);
    }

    pub fn restore(&self) {
        self.is_cut.send_replace(false);
    }

    /// Forwards until either side closes.
    async fn forward(self, mut client: TcpStream, mut server: TcpStream) {
        let mut cut = self.is_cut.subscribe();
        let (mut asked, mut answered) = (vec![0; 65_536], vec![0; 65_536]);
        loop {
            tokio::select! {
                () = async { drop(cut.wait_for(|is_cut| *is_cut).await) } => return,
                read = client.read(&mut asked) => {
                    let Ok(read @ 1..) = read else { return };
                    let is_commit = asked[..read].windows(COMMIT.len()).any(|bytes| bytes == COMMIT);
                    if server.write_all(&asked[..read]).await.is_err() {
                        return;
                    }
                    if is_commit && self.drops_response.swap(false, Ordering::SeqCst) {
                        // Once the server has answered, the commit is durable.
                        let _ = server.read(&mut answered).await;
                        self.lost.fetch_add(1, Ordering::SeqCst);
                        return;
                    }
                }
                read = server.read(&mut answered) => {
                    let Ok(read @ 1..) = read else { return };
                    if client.write_all(&answered[..read]).await.is_err() {
                        return;
                    }
                }
            }
        }
    }
}
