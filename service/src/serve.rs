//! Serving until SIGTERM, or until the supervisor is gone.

use std::future::Future;
use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

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

/// Answers until `stop` ends and the requests that came before it are answered.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    // An answer goes out in two pieces, head and body; the second is not to wait until the first is acknowledged, for 40 ms.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, router).with_graceful_shutdown(stop).await
}
