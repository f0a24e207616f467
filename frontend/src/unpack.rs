//! Logs and listings, which lie in the bucket compressed: passed on as they are to whoever can read that, unpacked piece
//! by piece for everybody else.

use std::io;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, header};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use zstd::stream::raw::{DParameter, Decoder, Operation};

/// Builders run foreign code, and a compressed object says how much memory it takes to unpack. 2^23: no more than 8 MB,
/// which is what zstd's highest ordinary level asks for.
const WINDOW: u32 = 23;
/// How long a log may take to be read: a reader who takes nothing keeps others from theirs.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// No log of ours has more than 64 MB; a few bytes that unpack to more than this are an attack.
const MOST: u64 = 256 << 20;
const PIECE: usize = 64 << 10;

/// Whether the client says that it can unpack a log by itself.
pub fn accepts_zstd(headers: &HeaderMap) -> bool {
    accepts(headers, "zstd")
}

/// Whether the client says that it knows this coding.
pub fn accepts(headers: &HeaderMap, known: &str) -> bool {
    let values = headers.get_all(header::ACCEPT_ENCODING).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|word| {
        let (coding, weight) = word.split_once(';').unwrap_or((word, "q=1"));
        let refused = weight.trim().strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0));
        coding.trim().eq_ignore_ascii_case(known) && !refused
    })
}

/// The plain bytes. What does not unpack breaks off, and so does what was not read within `patience`: the permit is free then, and the
/// memory, though nobody asks for another piece.
pub fn unpacked<E>(
    packed: impl Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
    permit: OwnedSemaphorePermit,
    patience: Duration,
) -> io::Result<impl Stream<Item = io::Result<Bytes>> + Send>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let mut decoder = Decoder::new()?;
    decoder.set_parameter(DParameter::WindowLogMax(WINDOW))?;
    let unpacker = Unpacker { decoder, input: Bytes::new(), more: false, within: false, given: 0 };
    let (out, pieces) = mpsc::channel(1);
    let packed = packed.map_err(io::Error::other);
    tokio::spawn(async move {
        let _permit = permit;
        tokio::select! {
            () = pump(packed, unpacker, &out) => {}
            () = out.closed() => {}
            () = tokio::time::sleep(patience) => {}
        }
    });
    Ok(stream::try_unfold(pieces, |mut pieces| async move {
        match pieces.recv().await {
            Some(Ok(Some(piece))) => Ok(Some((piece, pieces))),
            Some(Ok(None)) => Ok(None),
            Some(Err(error)) => Err(error),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }))
}

/// Passes on piece by piece, and the end. Whoever hears no end was cut off.
async fn pump(
    mut packed: impl Stream<Item = io::Result<Bytes>> + Unpin,
    mut unpacker: Unpacker,
    out: &mpsc::Sender<io::Result<Option<Bytes>>>,
) {
    loop {
        let piece = unpacker.next(&mut packed).await;
        let goes_on = matches!(piece, Ok(Some(_)));
        if out.send(piece).await.is_err() || !goes_on {
            return;
        }
    }
}

struct Unpacker {
    decoder: Decoder<'static>,
    input: Bytes,
    /// The last piece was full: there may be more without further input.
    more: bool,
    /// Something was begun and has not ended.
    within: bool,
    given: u64,
}

impl Unpacker {
    async fn next(
        &mut self,
        packed: &mut (impl Stream<Item = io::Result<Bytes>> + Unpin),
    ) -> io::Result<Option<Bytes>> {
        let mut piece = vec![0; PIECE];
        loop {
            if self.input.is_empty() && !self.more {
                match packed.next().await.transpose()? {
                    Some(input) => self.input = input,
                    None if self.within => return Err(io::ErrorKind::UnexpectedEof.into()),
                    None => return Ok(None),
                }
            }
            let status = self.decoder.run_on_buffers(&self.input, &mut piece)?;
            let _ = self.input.split_to(status.bytes_read);
            self.more = status.bytes_written == piece.len() && status.remaining > 0;
            self.within = status.remaining > 0;
            if status.bytes_written > 0 {
                self.given += status.bytes_written as u64;
                if self.given > MOST {
                    return Err(io::ErrorKind::FileTooLarge.into());
                }
                piece.truncate(status.bytes_written);
                return Ok(Some(piece.into()));
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    fn permit() -> OwnedSemaphorePermit {
        Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap()
    }

    fn pack(plain: &[u8]) -> Vec<u8> {
        zstd::encode_all(plain, 3).unwrap()
    }

    async fn unpack(packed: &[u8], chunk: usize) -> io::Result<Vec<u8>> {
        let chunks: Vec<_> =
            packed.chunks(chunk).map(|c| io::Result::Ok(Bytes::copy_from_slice(c))).collect();
        let pieces = unpacked(stream::iter(chunks), permit(), PATIENCE)?;
        let pieces: Vec<Bytes> = pieces.try_collect().await?;
        assert!(pieces.iter().all(|piece| piece.len() <= PIECE));
        Ok(pieces.concat())
    }

    fn text() -> Vec<u8> {
        (0..100_000).flat_map(|line| format!("line {line}\n").into_bytes()).collect()
    }

    #[tokio::test]
    async fn a_log_is_read_back_however_it_arrives() {
        let plain = text();
        for chunk in [1, 1000, 1 << 20] {
            assert_eq!(unpack(&pack(&plain), chunk).await.unwrap(), plain, "{chunk}");
        }
    }

    #[tokio::test]
    async fn whole_pieces_and_nothing_are_read_back() {
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE] {
            assert_eq!(unpack(&pack(&vec![7; length]), 1 << 20).await.unwrap(), vec![7; length], "{length}");
        }
        assert_eq!(unpack(b"", 1).await.unwrap(), b"");
    }

    #[tokio::test]
    async fn frames_follow_each_other() {
        let packed = [pack(b"one\n"), pack(b"two\n")].concat();
        assert_eq!(unpack(&packed, 3).await.unwrap(), b"one\ntwo\n");
    }

    #[tokio::test]
    async fn what_is_cut_or_no_zstd_breaks_off() {
        let packed = pack(&text());
        assert!(unpack(&packed[..packed.len() / 2], 1000).await.is_err());
        assert!(unpack(b"a plain text", 1000).await.is_err());
    }

    #[tokio::test]
    async fn what_takes_too_much_memory_breaks_off() {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(27).unwrap();
        encoder.write_all(&text()).unwrap();
        assert!(unpack(&encoder.finish().unwrap(), 1000).await.is_err());
    }

    #[tokio::test]
    async fn a_few_bytes_that_unpack_to_too_much_break_off() {
        let frame = pack(&vec![0; 1 << 20]);
        let frames = io::Result::Ok(Bytes::from(frame.repeat(300)));
        let pieces = unpacked(stream::iter([frames]), permit(), PATIENCE).unwrap();
        let outcome = pieces.try_fold(0, |sum, piece| async move { Ok(sum + piece.len()) }).await;
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    #[tokio::test]
    async fn who_does_not_read_keeps_nobody_out_for_ever() {
        let permits = Arc::new(Semaphore::new(1));
        let begin = |patience: Duration| {
            let chunks = [io::Result::Ok(Bytes::from(pack(&text())))];
            let pieces =
                unpacked(stream::iter(chunks), permits.clone().try_acquire_owned().unwrap(), patience);
            Box::pin(pieces.unwrap())
        };
        let mut slow = begin(Duration::from_millis(50));
        slow.try_next().await.unwrap().unwrap();
        drop(permits.acquire().await.unwrap());
        let rest = slow.try_fold((), |(), _| async { Ok(()) }).await;
        assert_eq!(rest.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(begin(PATIENCE));
        drop(permits.acquire().await.unwrap());
    }

    #[test]
    fn only_who_says_so_gets_zstd() {
        let accepts = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT_ENCODING, value.parse().unwrap());
            accepts_zstd(&headers)
        };
        assert!(accepts("gzip, zstd") && accepts("ZSTD;q=0.5"));
        assert!(!accepts("gzip") && !accepts("zstd;q=0") && !accepts("zstd;q=0.0") && !accepts("*"));
        assert!(!accepts_zstd(&HeaderMap::new()));
    }
}
