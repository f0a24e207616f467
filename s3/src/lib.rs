//! An S3 server on a directory: s3s-fs, with what it lacks of the checksums that publishing relies on. For one process,
//! which no other one shares the directory with.

mod checked;
mod list;

use std::future::Future;
use std::io;
use std::path::Path;

use axum::Router;
use axum::error_handling::HandleError;
use axum::http::StatusCode;
use axum::serve::ListenerExt;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;

pub use checked::Checked;

/// Answers whoever has this key until `stop` ends. A directory below `root` is a bucket.
pub async fn serve(
    root: &Path,
    key: &str,
    secret: &str,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let mut builder = S3ServiceBuilder::new(Checked::new(root)?);
    builder.set_auth(SimpleAuth::from_single(key.to_owned(), secret.to_owned()));
    answer(listener, builder.build(), stop).await
}

/// The same by any service.
pub async fn answer(
    listener: TcpListener,
    service: S3Service,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    // The body of a small object is not to wait until the head of the answer is acknowledged, for 40 ms.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    let service = HandleError::new(service, |_| async { StatusCode::INTERNAL_SERVER_ERROR });
    let router = Router::new().fallback_service(service);
    axum::serve(listener, router).with_graceful_shutdown(stop).await
}
