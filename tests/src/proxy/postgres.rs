//! One connection of PostgreSQL's protocol. The two directions are independent: notifications come unasked.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};

use super::{Cut, Fault, Script, Stream, cut};

/// Asks for TLS or GSS encryption, before the start proper.
const ENCRYPTION: [u32; 2] = [80_877_103, 80_877_104];

pub(super) async fn relay(client: Stream, server: Stream, script: Arc<Script>) -> io::Result<()> {
    let (mut client, mut to_client) = split(client);
    let (server, mut to_server) = split(server);
    loop {
        let length = client.read_u32().await?;
        let mut packet = vec![0; (length as usize).saturating_sub(4)];
        client.read_exact(&mut packet).await?;
        // We could not read what is encrypted: no, as a server without TLS says.
        if packet.first_chunk().is_some_and(|code| ENCRYPTION.contains(&u32::from_be_bytes(*code))) {
            to_client.write_all(b"N").await?;
            continue;
        }
        to_server.write_all(&[&length.to_be_bytes(), packet.as_slice()].concat()).await?;
        break;
    }
    let fault = Mutex::new(None);
    tokio::select! {
        ended = requests(client, to_server, &script, &fault) => ended,
        ended = answers(server, to_client, &fault) => ended,
    }
}

/// What happens to the next answer.
type Next = Mutex<Option<Fault>>;

async fn requests(
    mut client: impl AsyncRead + Unpin,
    server: impl AsyncWrite + Unpin,
    script: &Script,
    next: &Next,
) -> io::Result<()> {
    let mut server = Cut { writer: server, left: usize::MAX };
    let (mut pending, mut name) = (Vec::new(), Vec::new());
    loop {
        let message = message(&mut client).await?;
        let kind = message[0];
        pending.extend_from_slice(&message);
        match kind {
            // Parse: the statement's name, then its text.
            b'P' => name.push(text(message[5..].splitn(2, |&byte| byte == 0).nth(1).unwrap_or_default())),
            b'Q' => name.push(text(&message[5..])),
            _ => {}
        }
        if matches!(kind, b'S' | b'Q') {
            match script.arrives(std::mem::take(&mut name).join("; ")) {
                Some(Fault::Hold(until)) => drop(until.await),
                Some(Fault::CutRequest(bytes)) => {
                    server.left = bytes;
                    return server.write(&pending).await.and(Err(cut()));
                }
                Some(Fault::Answer(..)) => panic!("PostgreSQL's answers cannot be made up"),
                fault => *next.lock().unwrap_or_else(PoisonError::into_inner) = fault,
            }
        }
        // What only prepares a request waits for its end; passwords, COPY and the like do not.
        if !matches!(kind, b'P' | b'B' | b'D' | b'E' | b'C') {
            server.write(&std::mem::take(&mut pending)).await?;
        }
    }
}

async fn answers(
    mut server: impl AsyncRead + Unpin,
    client: impl AsyncWrite + Unpin,
    next: &Next,
) -> io::Result<()> {
    let mut client = Cut { writer: client, left: usize::MAX };
    let mut swallow = None;
    loop {
        let message = message(&mut server).await?;
        match next.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(Fault::CutResponse(bytes)) => client.left = bytes,
            Some(Fault::Swallow(call)) => swallow = Some(call),
            _ => {}
        }
        if swallow.is_none() {
            client.write(&message).await?;
        }
        // Ready for the next query: this was all of the answer.
        if message[0] == b'Z' {
            if let Some(call) = swallow {
                call();
                return Err(cut());
            }
            if client.left < usize::MAX / 2 {
                return Err(cut());
            }
        }
    }
}

async fn message(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut message = vec![0; 5];
    reader.read_exact(&mut message).await?;
    let length = u32::from_be_bytes([message[1], message[2], message[3], message[4]]) as usize;
    message.resize(1 + length.max(4), 0);
    reader.read_exact(&mut message[5..]).await?;
    Ok(message)
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
