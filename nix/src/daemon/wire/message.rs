//! What the daemon says while an operation runs.

use super::{Error, Input, MAX_FIELDS, MAX_TEXT, Result, number, sentence, text};
use crate::daemon::DaemonError;
use crate::daemon::message::{Field, Message};

const NEXT: u64 = 0x6f6c_6d67;
const READ: u64 = 0x6461_7461;
const WRITE: u64 = 0x6461_7416;
const LAST: u64 = 0x616c_7473;
const ERROR: u64 = 0x6378_7470;
const START_ACTIVITY: u64 = 0x5354_5254;
const STOP_ACTIVITY: u64 = 0x5354_4f50;
const RESULT: u64 = 0x5253_4c54;

/// One step of a running operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Something to show.
    Message(Message),
    /// The messages have ended, and the answer follows.
    Last,
    /// The operation failed, and no answer follows.
    Failed(DaemonError),
    /// The daemon wants that many bytes, as it does for operations of older protocols.
    Read(u64),
    /// The daemon sends data outside an answer, as it does for operations of older protocols.
    Write(Vec<u8>),
}

/// Reads the next step. All minor versions that are spoken here write it alike.
pub async fn read<R: Input>(input: &mut R) -> Result<Step> {
    let mut room = MAX_TEXT;
    Ok(match number(input).await? {
        NEXT => Step::Message(Message::Log(text(input, &mut room).await?)),
        START_ACTIVITY => Step::Message(Message::Start {
            id: number(input).await?,
            level: number(input).await?,
            kind: number(input).await?.into(),
            text: text(input, &mut room).await?,
            fields: fields(input, &mut room).await?,
            parent: number(input).await?,
        }),
        STOP_ACTIVITY => Step::Message(Message::Stop { id: number(input).await? }),
        RESULT => Step::Message(Message::Result {
            id: number(input).await?,
            kind: number(input).await?.into(),
            fields: fields(input, &mut room).await?,
        }),
        LAST => Step::Last,
        ERROR => Step::Failed(error(input, &mut room).await?),
        READ => Step::Read(number(input).await?),
        WRITE => Step::Write(text(input, &mut room).await?),
        other => return Err(Error::unexpected("a message", format_args!("{other:#x}"))),
    })
}

/// Reads a step from the front of `bytes`.
pub fn parse(bytes: &mut &[u8]) -> Result<Step> {
    super::ready(read(bytes))
}

async fn fields<R: Input>(input: &mut R, room: &mut usize) -> Result<Vec<Field>> {
    let mut fields = Vec::new();
    for index in 0..number(input).await? {
        let field = match number(input).await? {
            0 => Field::Number(number(input).await?),
            1 => Field::Text(text(input, room).await?),
            other => return Err(Error::unexpected("a kind of field", other)),
        };
        if index < MAX_FIELDS as u64 {
            fields.push(field);
        }
    }
    Ok(fields)
}

async fn error<R: Input>(input: &mut R, room: &mut usize) -> Result<DaemonError> {
    // What kind of error and, once, its name: always the same, and of no use.
    text(input, &mut 0).await?;
    let level = number(input).await?;
    text(input, &mut 0).await?;
    let message = sentence(input, room).await?;
    no_position(input).await?;
    let mut traces = Vec::new();
    for index in 0..number(input).await? {
        no_position(input).await?;
        let trace = sentence(input, room).await?;
        if index < MAX_FIELDS as u64 {
            traces.push(trace);
        }
    }
    Ok(DaemonError { level, message, traces, status: 1 })
}

/// Positions in Nix expressions are announced by a flag and have never been sent.
async fn no_position<R: Input>(input: &mut R) -> Result<()> {
    match number(input).await? {
        0 => Ok(()),
        other => Err(Error::unexpected("a position", other)),
    }
}
