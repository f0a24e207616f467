use std::io;
use std::time::Duration;

use nix_derivation::StorePath;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::connection::finish;
use super::wire::{self, Op, Request};
use super::{Connection, Error, PathInfo, Result, Sink};

/// Bytes of a frame: large enough that its 8 bytes of length and the two system calls do not count.
const FRAME: usize = 64 << 10;

const HEADER: usize = size_of::<u64>();

impl Connection {
    /// Adds a path by its NAR. Everything that it refers to must be valid. Without `check_signatures`, which takes
    /// a trusted user, it need not be signed.
    pub async fn add_to_store_nar(
        &mut self,
        path: &StorePath,
        info: &PathInfo,
        nar: &mut (impl AsyncRead + Unpin + Send),
        check_signatures: bool,
        limit: Duration,
        sink: &mut impl Sink,
    ) -> Result<()> {
        let request = Request::new(Op::AddToStoreNar)
            .path(path)
            .optional_path(info.deriver.as_ref())
            .string(info.nar_hash.hex())
            .paths(&info.references)
            .number(info.registration_time)
            .number(info.nar_size)
            .flag(info.ultimate)
            .list(&info.signatures, Request::string)
            .string(info.content_address.as_deref().unwrap_or_default())
            // Not a repair.
            .flag(false)
            .flag(!check_signatures);
        let minor = self.server().minor;
        let mut stream = self.begin()?;
        let work = async {
            stream.send(&request).await?;
            let enough = Notify::new();
            let mut sending = std::pin::pin!(send_frames(&mut stream.output, path, nar, &enough));
            let mut answering = std::pin::pin!(finish(&mut stream.input, minor, sink));
            // The daemon talks while it reads, and would wait for us as we wait for it.
            tokio::select! {
                sent = &mut sending => {
                    sent?;
                    answering.await
                }
                answer = &mut answering => {
                    enough.notify_one();
                    sending.await?;
                    answer
                }
            }
        };
        let outcome = timeout(limit, work).await;
        self.end(stream, request, limit, outcome)
    }
}

/// Sends the NAR in frames, each after its length, and an empty one at the end. Stops between two frames once the
/// daemon has `enough`; it reads up to the empty one in any case.
async fn send_frames(
    output: &mut (impl AsyncWrite + Unpin + Send),
    path: &StorePath,
    nar: &mut (impl AsyncRead + Unpin + Send),
    enough: &Notify,
) -> Result<()> {
    let mut frame = vec![0; HEADER + FRAME];
    loop {
        let read = tokio::select! {
            biased;
            () = enough.notified() => 0,
            read = fill(nar, &mut frame[HEADER..]) => {
                read.map_err(|source| Error::Source { path: path.clone(), source })?
            }
        };
        frame[..HEADER].copy_from_slice(&(read as u64).to_le_bytes());
        output.write_all(&frame[..HEADER + read]).await.map_err(wire::Error::from)?;
        if read == 0 {
            return Ok(());
        }
    }
}

/// Reads until the buffer is full or the input ends: many readers give little at a time.
async fn fill(nar: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match nar.read(&mut buffer[filled..]).await? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}
