//! S3 servers with an empty bucket: one in this process for speed, a second and independent one, and one that is unfit.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{
    BehaviorVersion, Credentials, Region, RequestChecksumCalculation, ResponseChecksumValidation,
};
use harmonia_s3::Checked;
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::SimpleAuth;
use s3s::dto::{CompleteMultipartUploadInput, PutObjectInput};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3Request, S3Result, s3_error};
use s3s_fs::FileSystem;
use tokio::sync::oneshot;

use crate::guard::{self, Guard, cache};
use crate::press::free_port;

/// The region that all of them believe to be in.
pub const REGION: &str = "us-east-1";

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// s3s-fs in this process. It moves an object into place before it compares checksums, so that an object stays
    /// after a mismatch, and its `If-None-Match` looks before it writes: no test may race uploads on it.
    InProcess,
    /// versitygw, a process of its own, on a file system.
    Versitygw,
    /// s3s-fs that takes every `If-None-Match` and every checksum for granted. It stands for the servers that do so,
    /// garage among them, which would take half an hour to compile: a bucket that must be recognised as unfit. The
    /// headers are ignored after the check of the signature, for they are signed.
    Unfit,
}

impl Server {
    /// The servers that a bucket of ours may be on.
    pub const FIT: [Server; 2] = [Server::InProcess, Server::Versitygw];
}

/// A running server with an empty bucket; both vanish with it.
pub struct S3 {
    /// The server's URL, without a trailing slash.
    pub endpoint: String,
    /// The bucket's name.
    pub bucket: String,
    /// Its owner's access key.
    pub access_key: String,
    /// Its owner's secret key.
    pub secret_key: String,
    _stop: Option<oneshot::Sender<()>>,
    _files: Guard,
}

impl S3 {
    /// A bucket that only its owner can read.
    pub async fn start(server: Server) -> S3 {
        S3::start_as(server, false).await
    }

    /// A bucket that everyone can read, object by object, at its plain URL.
    pub async fn start_public(server: Server) -> S3 {
        S3::start_as(server, true).await
    }

    async fn start_as(server: Server, public: bool) -> S3 {
        let files = Guard::new("s3-");
        let (access_key, secret_key) = ("test-access-key".to_owned(), "test-secret-key".to_owned());
        let (address, stop) = match server {
            Server::Versitygw => (start_versitygw(&files, &access_key, &secret_key), None),
            Server::InProcess | Server::Unfit => {
                let auth = SimpleAuth::from_single(access_key.clone(), secret_key.clone());
                let rules = Rules { public, careless: server == Server::Unfit };
                let service = in_process(files.directory(), auth, rules);
                let (address, stop) = guard::serve(async |listener| {
                    let _ = harmonia_s3::answer(listener, service, std::future::pending()).await;
                });
                (address, Some(stop))
            }
        };
        let s3 = S3 {
            endpoint: format!("http://{address}"),
            bucket: "bucket".to_owned(),
            access_key,
            secret_key,
            _stop: stop,
            _files: files,
        };
        let client = s3.client();
        client.create_bucket().bucket(&s3.bucket).send().await.expect("make the bucket");
        if public && server == Server::Versitygw {
            let policy = client.put_bucket_policy().bucket(&s3.bucket).policy(public_policy(&s3.bucket));
            policy.send().await.expect("publish the bucket");
        }
        s3
    }

    /// The bucket's plain URL, without a trailing slash.
    pub fn url(&self) -> String {
        format!("{}/{}", self.endpoint, self.bucket)
    }

    /// A client of the bucket's owner, for assertions.
    pub fn client(&self) -> Client {
        self.client_at(&self.endpoint)
    }

    /// The same at another address, such as a proxy's.
    pub fn client_at(&self, endpoint: &str) -> Client {
        let config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .http_client(aws_smithy_http_client::Builder::new().build_http())
            .region(Region::new(REGION))
            .endpoint_url(endpoint)
            .force_path_style(true)
            .credentials_provider(Credentials::new(&self.access_key, &self.secret_key, None, None, "test"))
            // Only what a test asks for, not the SDK's own checksums.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .build();
        Client::from_conf(config)
    }
}

fn public_policy(bucket: &str) -> String {
    serde_json::json!({
        "Version": "2012-10-17",
        "Statement": [{
            "Effect": "Allow",
            "Principal": "*",
            "Action": "s3:GetObject",
            "Resource": format!("arn:aws:s3:::{bucket}/*"),
        }],
    })
    .to_string()
}

/// It cannot tell which port it was given: we look for a free one, and for another if somebody took it meanwhile.
fn start_versitygw(guard: &Guard, access_key: &str, secret_key: &str) -> SocketAddr {
    let program = cache().join("versitygw-1.8.0");
    assert!(program.exists(), "{} is missing: run `./dev test s3`, which makes it", program.display());
    let data = guard.directory().join("data");
    std::fs::create_dir(&data).expect("make the data directory");
    for _ in 0..10 {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        guard.start(
            Command::new(&program)
                .env_clear()
                .current_dir(guard.directory())
                .args(["--quiet", "-p", &address.to_string(), "-a", access_key, "-s", secret_key, "posix"])
                .arg(&data),
        );
        while guard.runs() {
            thread::sleep(Duration::from_millis(10));
            // Whoever took the port would answer too, but then our process ends.
            if TcpStream::connect(address).is_ok() && guard.runs() {
                return address;
            }
        }
        guard.kill();
    }
    panic!("versitygw does not start:\n{}", guard.log());
}

fn in_process(directory: &Path, auth: SimpleAuth, rules: Rules) -> S3Service {
    let mut builder = if rules.careless {
        S3ServiceBuilder::new(FileSystem::new(directory).expect("open the directory"))
    } else {
        S3ServiceBuilder::new(Checked::new(directory).expect("open the directory"))
    };
    builder.set_auth(auth);
    builder.set_access(rules);
    builder.build()
}

/// Who may do what, and what is overlooked.
struct Rules {
    public: bool,
    careless: bool,
}

#[async_trait]
impl S3Access for Rules {
    async fn check(&self, context: &mut S3AccessContext<'_>) -> S3Result<()> {
        let readable = self.public && matches!(context.s3_op().name(), "GetObject" | "HeadObject");
        if context.credentials().is_some() || readable { Ok(()) } else { Err(s3_error!(AccessDenied)) }
    }

    async fn put_object(&self, request: &mut S3Request<PutObjectInput>) -> S3Result<()> {
        if self.careless {
            let input = &mut request.input;
            input.if_none_match = None;
            input.checksum_sha256 = None;
            input.checksum_algorithm = None;
        }
        Ok(())
    }

    async fn complete_multipart_upload(
        &self,
        request: &mut S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<()> {
        if self.careless {
            request.input.if_none_match = None;
        }
        Ok(())
    }
}
