//! How long a newcomer waits.

use std::time::Instant;

use harmonia_tests::pg::{Options, Server};

use super::farm::{Up, sync};
use crate::baseline::phase;

/// Until all roles of an empty farm are ready, over `initdb` and a start of PostgreSQL.
pub async fn against_initdb() -> f64 {
    let begin = Instant::now();
    let server = Server::start(Options::default());
    let bare = begin.elapsed().as_secs_f64();
    drop(server);
    sync();
    let begin = Instant::now();
    let up = phase("a farm", Up::start(&[])).await;
    let ours = begin.elapsed().as_secs_f64();
    up.stop().await;
    sync();
    eprintln!("   initdb and start {bare:.2} s; ours {ours:.2} s");
    ours / bare
}
