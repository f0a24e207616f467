//! The bucket: on an S3 server of this farm's own, or on one that exists.

use std::net::SocketAddr;

use reqwest::Url;

use super::error::UpError;
use super::layout::Layout;
use super::roles::{self, Variables};
use super::secrets;
use super::supervise::Supervisor;

pub const NAME: &str = "s3";
const BUCKET: &str = "cache";
const KEY_ID: &str = "harmonia-ci-up";

/// A bucket, as roles are told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    endpoint: String,
    /// The same for clients on other machines.
    public_endpoint: Option<String>,
    name: String,
    region: Option<String>,
    key_id: String,
    secret: String,
}

impl Bucket {
    /// The variables of a role that uses it. The secret is in a file.
    pub fn variables(&self, layout: &Layout) -> Variables {
        let mut variables = vec![
            ("S3_ENDPOINT", self.endpoint.clone()),
            ("S3_BUCKET", self.name.clone()),
            ("S3_ACCESS_KEY_ID", self.key_id.clone()),
            ("S3_SECRET_ACCESS_KEY_FILE", layout.secret("s3-secret").display().to_string()),
        ];
        variables.extend(self.region.clone().map(|region| ("S3_REGION", region)));
        variables.extend(self.public_endpoint.clone().map(|endpoint| ("S3_PUBLIC_ENDPOINT", endpoint)));
        variables
    }
}

/// Which bucket.
#[derive(Debug)]
pub enum Wanted {
    /// One that exists, by its URL.
    Given(String),
    /// One on a server of this farm's own, which listens there.
    Own(SocketAddr),
}

/// The bucket that is wanted, with its server if that is ours.
pub fn start(layout: &Layout, supervisor: &Supervisor, wanted: &Wanted) -> Result<Bucket, UpError> {
    let listen = match wanted {
        Wanted::Given(url) => {
            let bucket = parse(url)?;
            secrets::write(&layout.secret("s3-secret"), &bucket.secret)?;
            return Ok(bucket);
        }
        Wanted::Own(listen) => *listen,
    };
    let secret = secrets::once(&layout.secret("s3-own-secret"), secrets::password)?;
    secrets::write(&layout.secret("s3-secret"), &secret)?;
    let bucket = Bucket {
        endpoint: format!("http://{}", roles::local(listen)),
        public_endpoint: (!listen.ip().is_loopback()).then(|| super::public_url(listen)),
        name: BUCKET.to_owned(),
        region: None,
        key_id: KEY_ID.to_owned(),
        secret,
    };
    let mut variables = bucket.variables(layout);
    variables.push(("LISTEN", listen.to_string()));
    let root = layout.path("s3").into_os_string();
    supervisor.start(layout, roles::program(NAME, vec!["--root".into(), root], variables)?);
    Ok(bucket)
}

/// `http://KEY:SECRET@HOST:PORT/BUCKET?region=REGION`
fn parse(text: &str) -> Result<Bucket, UpError> {
    let url: Url = text.parse().map_err(|_| UpError::S3Url("is no URL"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(UpError::S3Url("is neither http nor https"));
    }
    let host = url.host_str().ok_or(UpError::S3Url("names no server"))?;
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    let key_id = decode(url.username());
    let secret = decode(url.password().unwrap_or_default());
    if key_id.is_empty() || secret.is_empty() {
        return Err(UpError::S3Url("has no key and secret"));
    }
    let name = url.path().trim_matches('/');
    if name.is_empty() || name.contains('/') {
        return Err(UpError::S3Url("does not name one bucket"));
    }
    let mut region = None;
    for (key, value) in url.query_pairs() {
        match &*key {
            "region" => region = Some(value.into_owned()),
            _ => return Err(UpError::S3Url("has a parameter other than region")),
        }
    }
    Ok(Bucket {
        endpoint: format!("{}://{host}{port}", url.scheme()),
        public_endpoint: None,
        name: name.to_owned(),
        region,
        key_id,
        secret,
    })
}

/// `%2F` and the like, of which secrets have many.
fn decode(text: &str) -> String {
    let pair = format!("_={}", text.replace('+', "%2B"));
    let base = Url::parse("http://localhost").map(|mut url| {
        url.set_query(Some(&pair));
        url.query_pairs().next().map(|(_, value)| value.into_owned()).unwrap_or_default()
    });
    base.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_server_bucket_and_key() {
        let bucket = parse("https://AKIA:a%2Fb+c@s3.example.org:9000/nix?region=eu-1").unwrap();
        assert_eq!(bucket.endpoint, "https://s3.example.org:9000");
        assert_eq!((bucket.name.as_str(), bucket.region.as_deref()), ("nix", Some("eu-1")));
        assert_eq!((bucket.key_id.as_str(), bucket.secret.as_str()), ("AKIA", "a/b+c"));
    }

    #[test]
    fn what_is_missing_is_named() {
        for (url, why) in [
            ("nonsense", "no URL"),
            ("ftp://k:s@h/b", "http"),
            ("http://h/b", "key"),
            ("http://k:s@h", "bucket"),
            ("http://k:s@h/b/c", "bucket"),
            ("http://k:s@h/b?zone=1", "region"),
        ] {
            let error = parse(url).unwrap_err().to_string();
            assert!(error.contains(why), "{url}: {error}");
        }
    }
}
