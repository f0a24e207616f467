use std::collections::BTreeSet;
use std::error::Error;
use std::time::Duration;

use harmonia_nix::daemon::wire::message::{self, Step};
use harmonia_nix::daemon::wire::{self, Acknowledged, Answer, NEWEST, OLDEST, handshake};
use harmonia_nix::daemon::{BuildResult, Connection, Freed, Options};
use harmonia_nix::store_path::{self, StorePath};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};

const LIMIT: Duration = Duration::from_secs(5);
const PATH: &str = "/nix/store/00000000000000000000000000000000-a";

/// What a daemon says. The first byte chooses a minor version and what was asked.
pub fn read(input: &[u8]) {
    let Some((choice, bytes)) = input.split_first() else { return };
    let versions = NEWEST - OLDEST + 1;
    let minor = OLDEST + choice % versions;
    match choice / versions % 8 {
        0 => told(handshake::parse(&mut &bytes[..])),
        1 => conversation::<()>(bytes, minor),
        2 => conversation::<bool>(bytes, minor),
        3 => conversation::<Acknowledged>(bytes, minor),
        4 => conversation::<BTreeSet<StorePath>>(bytes, minor),
        5 => conversation::<Freed>(bytes, minor),
        6 => conversation::<BuildResult>(bytes, minor),
        _ => connection(bytes),
    }
}

fn told<T>(outcome: Result<T, wire::Error>) {
    if let Err(error) = outcome {
        assert!(error.to_string().len() < 2000, "{error}");
    }
}

/// Operations of one kind, one after the other.
fn conversation<A: Answer>(mut bytes: &[u8], minor: u8) {
    loop {
        match message::parse(&mut bytes) {
            Ok(Step::Message(message)) => drop(message.log_line()),
            Ok(Step::Last) => match wire::parse::<A>(&mut bytes, minor) {
                Ok(_) => {}
                Err(error) => return told::<A>(Err(error)),
            },
            Ok(Step::Failed(error)) => drop(error.to_string()),
            Ok(Step::Read(_) | Step::Write(_)) => {}
            Err(error) => return told::<Step>(Err(error)),
        }
    }
}

/// The whole client, from the handshake on.
fn connection(bytes: &[u8]) {
    thread_local! {
        static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    }
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let (client, daemon) = UnixStream::pair().expect("a pair of sockets");
            let (mut heard, mut said) = daemon.into_split();
            let speak = async {
                said.write_all(bytes).await.ok();
                drop(said);
            };
            let mut nobody = tokio::io::sink();
            let listen = tokio::io::copy(&mut heard, &mut nobody);
            let _ = tokio::join!(speak, listen, operate(client));
        })
    });
}

async fn operate(client: UnixStream) -> Result<(), Box<dyn Error>> {
    let mut connection = Connection::open(client, &Options::default()).await?;
    let path = store_path::parse(PATH)?;
    connection.delete_with_referrers(&path, LIMIT).await.ok();
    connection.is_valid_path(&path).await?;
    Ok(())
}
