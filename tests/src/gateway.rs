//! A frontend before a press's private bucket, and what its clients are told.

use std::fs;

use harmonia_frontend::Frontend;
use harmonia_queue::people::{Scope, create_token};
use harmonia_service::settings::Settings;
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::press::Press;

/// A frontend in this process; it stops when it is dropped.
pub struct Gateway {
    /// Where its cache is.
    pub url: String,
    netrc: TempDir,
    task: JoinHandle<()>,
}

impl Gateway {
    /// Runs one, and makes a read token for clients.
    pub async fn start(press: &Press) -> Gateway {
        Gateway::start_with(press, |settings| settings).await
    }

    /// The same with further settings.
    pub async fn start_with(press: &Press, more: impl FnOnce(Settings) -> Settings) -> Gateway {
        let login = press.farm.database.make_login("harmonia_frontend").await;
        let settings =
            press.bucket_settings().with("database_url", login.direct_url).with("listen", "127.0.0.1:0");
        let frontend = Frontend::start(&more(settings)).await.expect("a frontend");
        let url = format!("http://{}/cache", frontend.address());
        let task = tokio::spawn(async move {
            frontend.serve(std::future::pending()).await.expect("it serves");
        });
        let token = create_token(&press.farm.frontend, "client", Scope::Read, None).await.expect("a token");
        let netrc = tempfile::tempdir().expect("a directory");
        let text = format!("machine 127.0.0.1 login nix password {token}\n");
        fs::write(netrc.path().join("netrc"), text).expect("write the netrc");
        Gateway { url, netrc, task }
    }

    /// Lines of `nix.conf` for a client that trusts our key alone and forgets what it missed.
    pub fn settings(&self, press: &Press) -> String {
        format!(
            "substituters = {}\ntrusted-public-keys = {}\nrequire-sigs = true\nnetrc-file = {}\n\
             narinfo-cache-negative-ttl = 0\n",
            self.url,
            press.public_key(),
            self.netrc.path().join("netrc").display()
        )
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}
