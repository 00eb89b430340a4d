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

/// Clones share the proxy's state.
#[derive(Clone)]
pub struct Proxy {
    pub address: SocketAddr,
    lose_answer: Arc<AtomicBool>,
    lost: Arc<AtomicUsize>,
    is_cut: watch::Sender<bool>,
}

impl Proxy {
    pub async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy {
            address: listener.local_addr().unwrap(),
            lose_answer: Arc::default(),
            lost: Arc::default(),
            is_cut: watch::Sender::new(false),
        };
        let wires = proxy.clone();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                if !*wires.is_cut.borrow() {
                    let server = TcpStream::connect(&server).await.unwrap();
                    tokio::spawn(wires.clone().wire(client, server));
                }
            }
        });
        proxy
    }

    /// Forwards the next commit, and drops the connection instead of its response.
    pub fn lose_next_answer(&self) {
        self.lose_answer.store(true, Ordering::SeqCst);
    }

    /// Number of lost responses.
    pub fn lost(&self) -> usize {
        self.lost.load(Ordering::SeqCst)
    }

    /// Cuts every connection and accepts no new one until [`Self::mend`].
    pub fn cut(&self) {
        self.is_cut.send_replace(true);
    }

    pub fn mend(&self) {
        self.is_cut.send_replace(false);
    }

    /// Forwards until either side closes.
    async fn wire(self, mut client: TcpStream, mut server: TcpStream) {
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
                    if is_commit && self.lose_answer.swap(false, Ordering::SeqCst) {
                        // The server has answered, so the commit is durable.
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
