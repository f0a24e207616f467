//! Words to the queue that must not be lost.

use std::time::Duration;

use harmonia_service::sentence::sentence;
use tokio::time::sleep;

/// Says it until it was heard: a database may be away for as long as a restart takes, or a weekend, and a new password may take
/// as long to arrive. None: the queue does not want to hear it.
pub async fn persist<T, F: Future<Output = harmonia_queue::Result<T>>>(
    mut call: impl FnMut() -> F,
) -> Option<T> {
    let mut pause = Duration::from_millis(100);
    loop {
        match call().await {
            Ok(answer) => return Some(answer),
            Err(error) if error.may_pass() => {
                tracing::debug!(%error, "the queue has not heard yet");
                sleep(pause).await;
                pause = (2 * pause).min(Duration::from_secs(10));
            }
            Err(error) => {
                tracing::warn!(error = sentence(&error), "the queue does not want to hear");
                return None;
            }
        }
    }
}
