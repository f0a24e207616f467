//! Serving until SIGTERM, or until the supervisor is gone.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;

use crate::settings::{Settings, SettingsError};
use crate::supervised::orphaned;

/// Ends with SIGTERM or Ctrl-C, or with the supervisor.
pub async fn stopped() -> io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = term.recv() => Ok(()),
        interrupted = tokio::signal::ctrl_c() => interrupted,
        () = orphaned() => Ok(()),
    }
}

/// How often SIGTERM or Ctrl-C came, for those to whom the second one means more than the first. Without a supervisor there is
/// nothing to wait for: that counts for two.
pub fn stops() -> io::Result<watch::Receiver<u32>> {
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (count, counted) = watch::channel(0);
    tokio::spawn(async move {
        let mut supervised = true;
        loop {
            let times = tokio::select! {
                _ = term.recv() => 1,
                _ = interrupt.recv() => 1,
                () = orphaned(), if supervised => {
                    supervised = false;
                    2
                }
                () = count.closed() => return,
            };
            count.send_modify(|count| *count += times);
        }
    });
    Ok(counted)
}

/// Binds before anything else is started, so that a taken port is found at once.
pub async fn bind(address: &str) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Where others reach a process that listens there. On all addresses there is no telling.
pub fn own_url(settings: &Settings, bound: SocketAddr) -> Result<String, SettingsError> {
    match settings.get("url") {
        Some(url) => Ok(url.trim_end_matches('/').to_owned()),
        None if bound.ip().is_unspecified() => settings.require("url").map(str::to_owned),
        None => Ok(format!("http://{bound}")),
    }
}

/// Whoever was stopped answers for so long what came before: a download, or a stream of events, may never end. Less than any role's
/// grace, with what it still has to say to others. A request that is cut is made again by whoever made it.
const LINGER: Duration = Duration::from_secs(5);

/// Answers until `stop` ends and the requests that came before it are answered, or have had their time.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    // An answer goes out in two pieces, head and body; the second is not to wait until the first is acknowledged, for 40 ms.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    let (stopped, lingering) = oneshot::channel();
    let stop = async move {
        stop.await;
        // Whoever counts the time may be gone.
        let _ = stopped.send(());
    };
    let over = async {
        match lingering.await {
            Ok(()) => sleep(LINGER).await,
            // Nobody will stop it.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        served = axum::serve(listener, router).with_graceful_shutdown(stop) => served,
        () = over => {
            tracing::warn!("requests that did not end are cut");
            Ok(())
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use axum::body::{Body, Bytes};
    use axum::routing::get;
    use futures::{StreamExt, stream};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn an_answer_that_never_ends_is_cut_some_seconds_after_the_stop() {
        let endless = || async {
            let first = stream::once(async { Ok::<_, io::Error>(Bytes::from_static(b"begun")) });
            Body::from_stream(first.chain(stream::pending()))
        };
        let (listener, address) = bind("127.0.0.1:0").await.unwrap();
        let (told, stop) = oneshot::channel::<()>();
        let router = Router::new().route("/", get(endless));
        let served = tokio::spawn(serve(listener, router, async { drop(stop.await) }));
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut answer = reqwest::get(format!("http://{address}/")).await.unwrap();
        assert_eq!(answer.chunk().await.unwrap().unwrap(), "begun");
        let begun = Instant::now();
        told.send(()).unwrap();
        served.await.unwrap().unwrap();
        assert!(begun.elapsed() >= LINGER, "{:?}", begun.elapsed());
    }
}
