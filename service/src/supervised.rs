//! Processes that a supervisor on the same machine started. It holds the other end of their standard input: when that ends,
//! so did the supervisor, however it came.

use std::io::Read;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use tokio::sync::watch;

/// Set by a supervisor for its children.
pub const VARIABLE: &str = "HARMONIA_CI_SUPERVISED";
/// The database and the bucket end with the supervisor too: what cannot be ended in order by then never can.
const PATIENCE: Duration = Duration::from_secs(10);

/// Ends when the supervisor has ended; never, if there is none. The process follows soon after, whatever it does.
pub async fn orphaned() {
    static ENDED: OnceLock<watch::Receiver<bool>> = OnceLock::new();
    if std::env::var_os(VARIABLE).is_none() {
        return std::future::pending().await;
    }
    let mut ended = ENDED.get_or_init(watch_input).clone();
    // The sender lives for as long as the process.
    let _ = ended.wait_for(|ended| *ended).await;
}

/// On a thread of its own: a runtime would wait for a read that never ends.
fn watch_input() -> watch::Receiver<bool> {
    let (say, said) = watch::channel(false);
    thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        while input.read(&mut [0; 64]).is_ok_and(|length| length > 0) {}
        say.send_replace(true);
        thread::sleep(PATIENCE);
        std::process::exit(1);
    });
    said
}
