use std::time::Duration;

use aws_config::BehaviorVersion;
use aws_config::identity::IdentityCache;
use aws_credential_types::provider::{ProvideCredentials, error::CredentialsError, future};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    Builder, Credentials, Region, RequestChecksumCalculation, ResponseChecksumValidation,
};
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};

use super::Bucket;
use crate::secret::Secret;
use crate::settings::{Settings, SettingsError};

/// One try. None of our calls moves more than a narinfo.
const TRY: Duration = Duration::from_secs(10);
/// To make one object of its parts, many servers copy them. One that answers "busy" is asked again within that, one that was silent
/// for so long is not: it may be at it still. The builder that waits hears an answer, for it waits for 60 s.
const COMPLETE: Duration = Duration::from_secs(50);

/// For calls at which the server works.
pub(super) fn patient() -> Builder {
    let timeouts = TimeoutConfig::builder().operation_timeout(COMPLETE).operation_attempt_timeout(COMPLETE);
    aws_sdk_s3::Config::builder().timeout_config(timeouts.build())
}

impl Bucket {
    /// The bucket that the settings name, with their key or with whatever the environment offers: variables, a web
    /// identity, the instance's role.
    pub async fn connect(settings: &Settings) -> Result<Self, SettingsError> {
        let http = aws_smithy_http_client::Builder::new()
            .tls_provider(Provider::Rustls(CryptoMode::Ring))
            .build_https();
        let mut loader = aws_config::defaults(BehaviorVersion::latest()).http_client(http);
        // A server of one's own has a region in name only: the instance's metadata is not asked for it.
        let anywhere = settings.get("s3_endpoint").map(|_| "us-east-1");
        if let Some(region) = settings.get("s3_region").or(anywhere) {
            loader = loader.region(Region::new(region.to_owned()));
        }
        if let Some(id) = settings.get("s3_access_key_id") {
            let secret = settings.require_secret("s3_secret_access_key")?;
            loader = loader.credentials_provider(StaticKey { id: id.to_owned(), secret });
            // A key in a file may change: it is read whenever it is needed.
            loader = loader.identity_cache(IdentityCache::no_cache());
        }
        let shared = loader.load().await;
        let virtual_host = settings.parse("s3_virtual_host")?.unwrap_or(false);
        let mut builder = Builder::from(&shared)
            .force_path_style(!virtual_host)
            // What we send has the checksums we ask for, and servers other than AWS's stumble over any more.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .retry_config(RetryConfig::standard().with_max_attempts(3))
            .timeout_config(TimeoutConfig::builder().operation_attempt_timeout(TRY).build());
        if shared.region().is_none() {
            builder = builder.region(Region::from_static("us-east-1"));
        }
        if let Some(endpoint) = settings.get("s3_endpoint") {
            builder = builder.endpoint_url(endpoint);
        }
        let outside = match settings.get("s3_public_endpoint") {
            Some(endpoint) => builder.clone().endpoint_url(endpoint),
            None => builder.clone(),
        };
        let name = settings.require("s3_bucket")?.to_owned();
        let server = match settings.get("s3_endpoint") {
            Some(endpoint) => place(endpoint),
            None => "AWS".to_owned(),
        };
        Ok(Self {
            client: Client::from_conf(builder.build()),
            outside: Client::from_conf(outside.build()),
            name,
            server,
        })
    }
}

/// A URL without what may be secret: who asks, with which password, for what.
pub(crate) fn place(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    if scheme.is_empty() { host.to_owned() } else { format!("{scheme}://{host}") }
}

#[derive(Debug)]
struct StaticKey {
    id: String,
    secret: Secret,
}

impl ProvideCredentials for StaticKey {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::ready(match self.secret.read() {
            Ok(secret) => Ok(Credentials::new(&self.id, secret, None, None, "harmonia-ci")),
            Err(error) => Err(CredentialsError::provider_error(error)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_no_secrets() {
        assert_eq!(place("https://me:secret@s3.example.org:9000/x?y=z"), "https://s3.example.org:9000");
        assert_eq!(place("http://127.0.0.1:9000"), "http://127.0.0.1:9000");
        assert_eq!(place("me:secret@s3"), "s3");
    }
}
