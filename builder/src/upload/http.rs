use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Response};

use super::UploadError;

/// The client for signers and the bucket. reqwest wants a provider of cryptography for the whole process before it makes a
/// client; if none is installed yet, this installs ring.
///
/// It follows no redirect, or the token would travel to whoever is named, and speaks HTTP/1.1, so that parts
/// sent at the same time do not share one connection's window.
pub fn http_client() -> Result<Client, UploadError> {
    build(builder())
}

/// The same for servers of this machine, to which no proxy knows the way.
pub fn local_http_client() -> Result<Client, UploadError> {
    build(builder().no_proxy())
}

fn builder() -> ClientBuilder {
    // An error says that another one is installed already: that one serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .connect_timeout(Duration::from_secs(5))
        .pool_idle_timeout(Duration::from_secs(30))
        .redirect(Policy::none())
        .http1_only()
}

fn build(builder: ClientBuilder) -> Result<Client, UploadError> {
    builder.build().map_err(|error| UploadError::Client(error.without_url()))
}

/// The body of an answer, up to `most` bytes of it.
pub(super) async fn body(mut response: Response, most: usize) -> Result<Vec<u8>, reqwest::Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(reqwest::Error::without_url)? {
        bytes.extend_from_slice(&chunk[..chunk.len().min(most - bytes.len())]);
        if bytes.len() == most {
            break;
        }
    }
    Ok(bytes)
}
