//! How a connection begins.

use std::collections::BTreeSet;

use tokio::io::{AsyncWrite, AsyncWriteExt};

use super::{Error, Input, MAX_WORD, NEWEST, OLDEST, Result, number, word, words};

const CLIENT_MAGIC: u64 = 0x6e69_7863;
const SERVER_MAGIC: u64 = 0x6478_696f;
const MAJOR: u64 = 1;

/// What the daemon says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// The minor version that both speak.
    pub minor: u8,
    /// The features that it has. None is offered here, so none is in use.
    pub features: BTreeSet<String>,
    /// The version of its Nix.
    pub nix_version: String,
    /// Whether it trusts this user.
    pub trust: Trust,
}

/// Whether the daemon trusts this user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// It does not say, as is the case before 1.35.
    Unknown,
    /// This user may set every option, add unsigned paths and build derivations by value.
    Trusted,
    /// This user may not.
    NotTrusted,
}

/// Greets the daemon as a client of minor version `newest` and learns what it is. The messages that follow, up to
/// their end, are the caller's to read.
pub async fn greet<R: Input, W: AsyncWrite + Unpin + Send>(
    input: &mut R,
    output: &mut W,
    newest: u8,
) -> Result<Server> {
    write(output, &[CLIENT_MAGIC]).await?;
    match number(input).await? {
        SERVER_MAGIC => {}
        other => return Err(Error::NotADaemon(other)),
    }
    let minor = negotiate(newest, number(input).await?)?;
    write(output, &[MAJOR << 8 | u64::from(newest)]).await?;

    let mut features = BTreeSet::new();
    if minor >= 38 {
        // The empty list of features that are offered.
        write(output, &[0]).await?;
        features = words(input, "the features of the daemon").await?;
    }
    // Two obsolete words: no CPU affinity, no reserved space.
    write(output, &[0, 0]).await?;
    let nix_version = word(input, "the version of Nix", MAX_WORD).await?;
    let trust = if minor >= 35 { trust(number(input).await?)? } else { Trust::Unknown };
    Ok(Server { minor, features, nix_version, trust })
}

/// Reads the daemon's half of a handshake from the front of `bytes`.
pub fn parse(bytes: &mut &[u8]) -> Result<Server> {
    super::ready(greet(bytes, &mut tokio::io::sink(), NEWEST))
}

/// The minor version that both speak.
fn negotiate(newest: u8, server: u64) -> Result<u8> {
    let (major, minor) = (server >> 8, server & 0xff);
    if major != MAJOR || minor < OLDEST.into() {
        return Err(Error::Unsupported { major, minor });
    }
    Ok(newest.min(minor as u8))
}

fn trust(word: u64) -> Result<Trust> {
    match word {
        0 => Ok(Trust::Unknown),
        1 => Ok(Trust::Trusted),
        2 => Ok(Trust::NotTrusted),
        other => Err(Error::unexpected("trust", other)),
    }
}

async fn write<W: AsyncWrite + Unpin + Send>(output: &mut W, numbers: &[u64]) -> Result<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    Ok(output.write_all(&bytes).await?)
}
