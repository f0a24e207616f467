//! A real proxy on loopback, before an HTTP server or a PostgreSQL, that counts requests and does harm on demand.

mod http;
mod postgres;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::future::Shared;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::oneshot;

use crate::guard;

/// What the proxy stands before.
#[derive(Debug, Clone)]
pub enum Target {
    /// An address.
    Tcp(SocketAddr),
    /// A unix socket, such as a private PostgreSQL's.
    Unix(PathBuf),
}

/// What happens to one request.
pub enum Fault {
    /// It does not reach the server; this status and this body are the answer. HTTP only.
    Answer(u16, String),
    /// The server gets so many of its bytes, then both connections are cut.
    CutRequest(usize),
    /// The client gets so many bytes of its answer, then both connections are cut.
    CutResponse(usize),
    /// The server gets all of it and answers, the client gets nothing: this is called and then the connections are cut.
    Swallow(Box<dyn FnOnce() + Send>),
    /// It reaches the server when the other half says so, or is dropped, and so does whatever has its name: a client that loses
    /// patience asks again.
    Hold(Shared<oneshot::Receiver<()>>),
}

impl Fault {
    /// [`Fault::Hold`], and what ends it.
    pub fn hold() -> (oneshot::Sender<()>, Fault) {
        let (release, held) = oneshot::channel();
        (release, Fault::Hold(held.shared()))
    }

    /// What S3 says to those who ask too much.
    pub fn slow_down() -> Fault {
        let body = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
                    <Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>";
        Fault::Answer(503, body.to_owned())
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Answer(status, _) => write!(formatter, "Answer({status})"),
            Fault::CutRequest(bytes) => write!(formatter, "CutRequest({bytes})"),
            Fault::CutResponse(bytes) => write!(formatter, "CutResponse({bytes})"),
            Fault::Swallow(_) => write!(formatter, "Swallow"),
            Fault::Hold(_) => write!(formatter, "Hold"),
        }
    }
}

/// A running proxy, which ends with all its connections when it is dropped.
pub struct Proxy {
    address: SocketAddr,
    script: Arc<Script>,
    _stop: oneshot::Sender<()>,
}

impl Proxy {
    /// Before an HTTP/1.1 server. A request is named by its method and path, such as `PUT /bucket/key`.
    pub fn http(target: Target) -> Proxy {
        Proxy::start(target, |client, server, script| Box::pin(http::relay(client, server, script)))
    }

    /// Before a PostgreSQL. A request is all that the client sends up to what makes the server answer: a Sync, or a
    /// simple query. It is named by the texts of its statements; one that was prepared before has none.
    pub fn postgres(target: Target) -> Proxy {
        Proxy::start(target, |client, server, script| Box::pin(postgres::relay(client, server, script)))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The names of the requests so far, also of those that were harmed, in the order of their arrival.
    pub fn requests(&self) -> Vec<String> {
        self.script.lock().requests.clone()
    }

    /// Harms the k-th request from now on, counted from one.
    pub fn on(&self, k: usize, fault: Fault) {
        self.on_matching(k, |_| true, fault);
    }

    /// Harms the k-th request from now on, counted from one, whose name matches.
    pub fn on_matching(&self, k: usize, matches: impl Fn(&str) -> bool + Send + 'static, fault: Fault) {
        assert!(k > 0, "requests are counted from one");
        self.script.lock().rules.push(Rule { left: k, matches: Box::new(matches), fault });
    }

    /// Forgets the faults that did not happen yet, and the requests; how many faults there were.
    pub fn reset(&self) -> usize {
        let mut plan = self.script.lock();
        plan.requests.clear();
        plan.rules.drain(..).count()
    }

    fn start(target: Target, relay: Relay) -> Proxy {
        let script = Arc::new(Script::default());
        let shared = script.clone();
        let (address, stop) = guard::serve(move |listener| accept(listener, target, shared, relay));
        Proxy { address, script, _stop: stop }
    }
}

type Relay = fn(Stream, Stream, Arc<Script>) -> futures::future::BoxFuture<'static, io::Result<()>>;

async fn accept(listener: TcpListener, target: Target, script: Arc<Script>, relay: Relay) {
    while let Ok((client, _)) = listener.accept().await {
        let (target, script) = (target.clone(), script.clone());
        // An error is the end of a connection, wanted or not: both sides are cut, and see it.
        tokio::spawn(async move {
            let server = target.connect().await?;
            client.set_nodelay(true)?;
            relay(Box::new(client), server, script).await
        });
    }
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}
type Stream = Box<dyn Duplex>;

impl Target {
    async fn connect(&self) -> io::Result<Stream> {
        match self {
            Target::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            Target::Unix(path) => Ok(Box::new(UnixStream::connect(path).await?)),
        }
    }
}

#[derive(Default)]
struct Script {
    plan: Mutex<Plan>,
}

#[derive(Default)]
struct Plan {
    requests: Vec<String>,
    rules: Vec<Rule>,
}

struct Rule {
    left: usize,
    matches: Box<dyn Fn(&str) -> bool + Send>,
    fault: Fault,
}

impl Script {
    fn lock(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request down and says what happens to it.
    fn arrives(&self, name: String) -> Option<Fault> {
        let mut plan = self.lock();
        let mut due = None;
        for (index, rule) in plan.rules.iter_mut().enumerate() {
            if (rule.matches)(&name) {
                rule.left = rule.left.saturating_sub(1);
                // One fault a request: a second one waits for the next that matches.
                due = due.or((rule.left == 0).then_some(index));
            }
        }
        plan.requests.push(name.clone());
        let fault = plan.rules.remove(due?).fault;
        if let Fault::Hold(until) = &fault {
            let again = Fault::Hold(until.clone());
            plan.rules.push(Rule { left: 1, matches: Box::new(move |other| other == name), fault: again });
        }
        Some(fault)
    }
}

/// A writer that ends the connection after so many bytes.
struct Cut<W> {
    writer: W,
    left: usize,
}

impl<W: AsyncWrite + Unpin> Cut<W> {
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let passed = bytes.len().min(self.left);
        self.left -= passed;
        self.writer.write_all(&bytes[..passed]).await?;
        self.writer.flush().await?;
        if passed < bytes.len() { Err(cut()) } else { Ok(()) }
    }

    async fn copy(&mut self, reader: &mut (impl AsyncRead + Unpin), mut length: u64) -> io::Result<()> {
        let mut buffer = vec![0; 64 * 1024];
        while length > 0 {
            let most = buffer.len().min(usize::try_from(length).unwrap_or(usize::MAX));
            let read = reader.read(&mut buffer[..most]).await?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.write(&buffer[..read]).await?;
            length -= read as u64;
        }
        Ok(())
    }
}

fn cut() -> io::Error {
    io::Error::other("cut by the proxy")
}
