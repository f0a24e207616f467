//! A frontend in a process of its own.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use harmonia_tests::eventually;
use harmonia_tests::press::free_port;
use harmonia_tests::s3::{REGION, S3, Server};

use crate::farm::Farm;

/// It ends with this.
pub struct Front {
    child: Child,
    pub url: String,
    pub http: reqwest::Client,
    _s3: S3,
}

impl Front {
    /// Before a farm's database, open to whoever looks.
    pub async fn start(farm: &Farm) -> Self {
        let s3 = S3::start(Server::InProcess).await;
        let login = farm.database.make_login("harmonia_frontend").await;
        let listen = format!("127.0.0.1:{}", free_port());
        let own = std::env::current_exe().expect("this program");
        let settings = [
            ("DATABASE_URL", login.direct_url.as_str()),
            ("LISTEN", &listen),
            ("ANONYMOUS_READ", "true"),
            ("S3_ENDPOINT", &s3.endpoint),
            ("S3_BUCKET", &s3.bucket),
            ("S3_REGION", REGION),
            ("S3_ACCESS_KEY_ID", &s3.access_key),
            ("S3_SECRET_ACCESS_KEY", &s3.secret_key),
        ];
        let mut command = Command::new(own.with_file_name("harmonia-ci"));
        command.arg("frontend").stdout(Stdio::null()).stderr(Stdio::null());
        for (name, value) in settings {
            command.env(format!("HARMONIA_CI_{name}"), value);
        }
        let child = command.spawn().expect("harmonia-ci is built beside this program");
        let http = harmonia_builder::upload::http_client().expect("a client");
        let front = Self { child, url: format!("http://{listen}"), http, _s3: s3 };
        eventually("the frontend is ready", || async {
            let answer =
                front.http.get(format!("{}/readyz", front.url)).timeout(Duration::from_secs(5)).send().await;
            answer.is_ok_and(|answer| answer.status() == 200)
        })
        .await;
        front
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What is answered, and how long that took to its last byte.
    pub async fn get(&self, path: &str) -> (Vec<u8>, Duration) {
        let begun = std::time::Instant::now();
        let request = self.http.get(format!("{}{path}", self.url)).header("accept-encoding", "gzip");
        let answer = request.send().await.expect("an answer").error_for_status().expect(path);
        let bytes = answer.bytes().await.expect("all of it").to_vec();
        (bytes, begun.elapsed())
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
