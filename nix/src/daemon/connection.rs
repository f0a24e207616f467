use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use super::message::{Quiet, Sink};
use super::wire::handshake::{self, Server};
use super::wire::message::{self, Step};
use super::wire::{self, Answer, Request};
use super::{Error, Options, Result};

/// How long connecting and a question may take. Questions wait for locks of the store's database and, with
/// substitutes, for a few answers over the network, whose own timeouts are well below this.
pub const QUERY_LIMIT: Duration = Duration::from_secs(300);

/// A connection to the daemon, for one operation at a time.
#[derive(Debug)]
pub struct Connection {
    server: Server,
    /// Away while an operation runs. An operation that does not come to its end drops it, which closes the socket.
    stream: Option<Stream>,
}

#[derive(Debug)]
struct Stream {
    input: BufReader<OwnedReadHalf>,
    output: OwnedWriteHalf,
}

impl Connection {
    /// Connects, says hello and sends the options.
    pub async fn connect(socket: &Path, options: &Options) -> Result<Self> {
        let connected = timeout(QUERY_LIMIT, UnixStream::connect(socket)).await;
        let stream = connected
            .unwrap_or_else(|elapsed| Err(elapsed.into()))
            .map_err(|source| Error::Connect { socket: socket.to_owned(), source })?;
        Self::open(stream, options).await
    }

    /// The same over a socket that is connected already.
    pub async fn open(stream: UnixStream, options: &Options) -> Result<Self> {
        Self::open_as(stream, options, wire::NEWEST).await
    }

    /// The same as a client that speaks no newer minor version than `newest`.
    pub async fn open_as(stream: UnixStream, options: &Options, newest: u8) -> Result<Self> {
        let (input, output) = stream.into_split();
        let mut stream = Stream { input: BufReader::new(input), output };
        let hello = async {
            let server = handshake::greet(&mut stream.input, &mut stream.output, newest).await?;
            // What the daemon has to say about its start; an error here is a refusal.
            stream.finish::<()>(server.minor, &mut Quiet).await?;
            Ok::<_, Error>(server)
        };
        let server = timeout(QUERY_LIMIT, hello)
            .await
            .map_err(|_| Error::TimedOut { operation: "the handshake", limit: QUERY_LIMIT })??;
        let mut connection = Self { server, stream: Some(stream) };
        connection.ask::<()>(options.request()).await?;
        Ok(connection)
    }

    /// What the daemon said of itself.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Whether every operation so far came to its end, so that another one can begin, and the daemon neither left since nor sent what nobody asked for.
    pub(super) fn is_idle(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| {
            let unread = stream.input.get_ref().try_read(&mut [0]);
            stream.input.buffer().is_empty()
                && matches!(unread, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
        })
    }

    /// A question, answered within [`QUERY_LIMIT`].
    pub(super) async fn ask<A: Answer>(&mut self, request: Request) -> Result<A> {
        self.run(request, QUERY_LIMIT, &mut Quiet).await
    }

    /// An operation from its request to its answer.
    pub(super) async fn run<A: Answer>(
        &mut self,
        request: Request,
        limit: Duration,
        sink: &mut impl Sink,
    ) -> Result<A> {
        let mut stream = self.stream.take().ok_or(Error::Broken)?;
        let work = async {
            stream.send(&request).await?;
            stream.finish(self.server.minor, sink).await
        };
        let late = |_| Err(Error::TimedOut { operation: request.op.name(), limit });
        let outcome = timeout(limit, work).await.unwrap_or_else(late);
        // Between two operations: after an answer, and after an error of the daemon, which stands in the place of one.
        if matches!(outcome, Ok(_) | Err(Error::Daemon(_))) {
            self.stream = Some(stream);
        }
        outcome
    }
}

impl Stream {
    async fn send(&mut self, request: &Request) -> Result<()> {
        Ok(self.output.write_all(&request.bytes).await.map_err(wire::Error::from)?)
    }

    /// Passes on messages until they end, and reads the answer.
    async fn finish<A: Answer>(&mut self, minor: u8, sink: &mut impl Sink) -> Result<A> {
        loop {
            match message::read(&mut self.input).await? {
                Step::Message(message) => sink.take(message).await,
                Step::Last => return Ok(A::read(&mut self.input, minor).await?),
                Step::Failed(error) => return Err(Error::Daemon(error)),
                // No operation here has data of that kind since 1.23.
                Step::Read(length) => {
                    return Err(wire::Error::unexpected("a request for data", length).into());
                }
                Step::Write(data) => return Err(wire::Error::unexpected("bytes of data", data.len()).into()),
            }
        }
    }
}
