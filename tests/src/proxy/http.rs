//! One connection of HTTP/1.1, request by request. A request is forwarded while its answer is awaited: a server may
//! answer, and hang up, before it has read all of it.

use std::io;
use std::pin::pin;
use std::sync::Arc;

use tokio::io::{
    AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, sink, split,
};

use super::{Cut, Fault, Script, Stream, cut};

pub(super) async fn relay(client: Stream, server: Stream, script: Arc<Script>) -> io::Result<()> {
    let (client, mut to_client) = split(client);
    let (server, mut to_server) = split(server);
    let (mut client, mut server) = (BufReader::new(client), BufReader::new(server));
    loop {
        let request = tokio::select! {
            head = Head::read(&mut client) => head?,
            // Nothing can come but the end of an idle connection, which the client should see.
            _ = server.fill_buf() => return Ok(()),
        };
        let (mut request_bytes, mut response_bytes, mut swallow) = (usize::MAX, usize::MAX, None);
        match script.arrives(request.name()) {
            None => {}
            Some(Fault::Hold(until)) => drop(until.await),
            Some(Fault::CutRequest(bytes)) => request_bytes = bytes,
            Some(Fault::CutResponse(bytes)) => response_bytes = bytes,
            Some(Fault::Swallow(call)) => swallow = Some(call),
            Some(Fault::Answer(status, body)) => {
                request.copy_body(&mut client, &mut unlimited(sink())).await?;
                let body = if request.is("HEAD") { "" } else { &body };
                let head = format!("HTTP/1.1 {status} Fault\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                to_client.write_all(head.as_bytes()).await?;
                to_client.flush().await?;
                continue;
            }
        }
        let mut up = Cut { writer: &mut to_server, left: request_bytes };
        let mut silent = sink();
        let writer: &mut (dyn AsyncWrite + Send + Unpin) =
            if swallow.is_some() { &mut silent } else { &mut to_client };
        let mut down = Cut { writer, left: response_bytes };
        let mut sending = pin!(async {
            up.write(&request.bytes).await?;
            request.copy_body(&mut client, &mut up).await
        });
        let mut receiving = pin!(answer(&request, &mut server, &mut down));
        let mut sent = None;
        let stays = loop {
            tokio::select! {
                result = &mut sending, if sent.is_none() => {
                    if request_bytes < usize::MAX {
                        return result.and(Err(cut()));
                    }
                    sent = Some(result.is_ok());
                }
                stays = &mut receiving => break stays?,
            }
        };
        if let Some(call) = swallow {
            call();
            return Err(cut());
        }
        if response_bytes < usize::MAX || !stays {
            return Ok(());
        }
        // Answered early: the connection lives on if the server reads the rest.
        let sent = match sent {
            Some(sent) => sent,
            None => sending.await.is_ok(),
        };
        if !sent {
            return Ok(());
        }
    }
}

/// Passes an answer on, with what comes before it; whether the connection can be used again.
async fn answer<R: AsyncBufRead + Unpin, W: AsyncWrite + Unpin>(
    request: &Head,
    server: &mut R,
    client: &mut Cut<W>,
) -> io::Result<bool> {
    loop {
        let head = Head::read(server).await?;
        client.write(&head.bytes).await?;
        let status = head.word(1);
        if status.starts_with('1') {
            continue;
        }
        if request.is("HEAD") || status == "204" || status == "304" {
            return Ok(head.stays());
        }
        if head.value("content-length").is_none() && !head.is_chunked() {
            let mut rest = Vec::new();
            server.read_to_end(&mut rest).await?;
            client.write(&rest).await?;
            return Ok(false);
        }
        head.copy_body(server, client).await?;
        return Ok(head.stays());
    }
}

/// The bytes up to and with the empty line.
struct Head {
    bytes: Vec<u8>,
}

impl Head {
    async fn read(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Head> {
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            if reader.read_until(b'\n', &mut bytes).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(Head { bytes })
    }

    fn lines(&self) -> impl Iterator<Item = &str> {
        self.bytes.split(|&byte| byte == b'\n').map(|line| str::from_utf8(line).unwrap_or_default().trim())
    }

    fn word(&self, index: usize) -> &str {
        self.lines().next().and_then(|line| line.split(' ').nth(index)).unwrap_or_default()
    }

    fn is(&self, method: &str) -> bool {
        self.word(0) == method
    }

    /// Without the query, in which signatures are.
    fn name(&self) -> String {
        format!("{} {}", self.word(0), self.word(1).split('?').next().unwrap_or_default())
    }

    fn value(&self, name: &str) -> Option<&str> {
        let mut fields = self.lines().skip(1).filter_map(|line| line.split_once(':'));
        fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    fn is_chunked(&self) -> bool {
        self.value("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"))
    }

    fn stays(&self) -> bool {
        !self.value("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }

    async fn copy_body<R: AsyncBufRead + Unpin, W: AsyncWrite + Unpin>(
        &self,
        reader: &mut R,
        writer: &mut Cut<W>,
    ) -> io::Result<()> {
        if !self.is_chunked() {
            let length = self.value("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
            return writer.copy(reader, length).await;
        }
        loop {
            let size = line(reader).await?;
            writer.write(&size).await?;
            let digits = str::from_utf8(&size).unwrap_or_default().split(';').next().unwrap_or_default();
            let length = u64::from_str_radix(digits.trim(), 16).map_err(io::Error::other)?;
            if length == 0 {
                break;
            }
            writer.copy(reader, length + 2).await?;
        }
        loop {
            let trailer = line(reader).await?;
            writer.write(&trailer).await?;
            if trailer == b"\r\n" {
                return Ok(());
            }
        }
    }
}

async fn line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    match reader.read_until(b'\n', &mut line).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line),
    }
}

fn unlimited<W>(writer: W) -> Cut<W> {
    Cut { writer, left: usize::MAX }
}
