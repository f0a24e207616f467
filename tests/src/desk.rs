//! Real evaluators beside a [`Press`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harmonia_evaluator::EvaluatorError;
use harmonia_queue::evaluations::{self, Evaluation, Request, Stage};
use harmonia_service::settings::Settings;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::nixes::Nix;
use crate::press::{Press, free_port};

/// An evaluator in this process.
pub struct RunningEvaluator {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), EvaluatorError>>,
    state: TempDir,
    /// Where its own pages are.
    pub url: String,
    _nix: Arc<Nix>,
}

/// The settings of an evaluator that takes sources of this machine.
pub async fn settings(press: &Press, nix: &Nix, name: &str, state: &Path) -> Settings {
    let login = press.farm.database.make_login("harmonia_evaluator").await;
    Settings::default()
        .with("database_url", login.direct_url)
        .with("listen", format!("127.0.0.1:{}", free_port()))
        .with("node", name)
        .with("state_dir", state.display().to_string())
        .with("nix_daemon", nix.socket().display().to_string())
        .with("nix_root", nix.root().display().to_string())
        .with("nix_bin", nix.bin().display().to_string())
        .with("local_sources", "true")
        .with("eval_confine", confine().display().to_string())
        .with("eval_visible", newer_nix())
}

/// Where the newer Nix is: not beside other things that a machine has.
fn newer_nix() -> String {
    let parts = std::fs::read_dir(crate::cache()).into_iter().flatten().flatten();
    let nix = parts.map(|part| part.path().display().to_string()).filter(|path| path.contains("/nix-forky-"));
    nix.collect::<Vec<_>>().join(":")
}

/// A program of ours whose verb `confine` is: Cargo builds it for the tests of this crate.
pub fn confine() -> PathBuf {
    let own = std::env::current_exe().expect("this program");
    let directory = own.parent().expect("its directory");
    let above = if directory.ends_with("deps") { directory.parent() } else { None };
    above.unwrap_or(directory).join("bench")
}

impl RunningEvaluator {
    /// An evaluator with this store and further settings.
    pub async fn start(
        press: &Press,
        nix: Arc<Nix>,
        name: &str,
        more: impl FnOnce(Settings) -> Settings,
    ) -> RunningEvaluator {
        let state = tempfile::tempdir().expect("a directory");
        let settings = more(settings(press, &nix, name, state.path()).await);
        let url = format!("http://{}", settings.get("listen").expect("an address"));
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let stop = async { drop(stopped.await) };
            harmonia_evaluator::run(&settings, stop).await
        });
        RunningEvaluator { stop: Some(stop), task, state, url, _nix: nix }
    }

    /// Where it works.
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// Stops it as SIGTERM would.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        (&mut self.task).await.expect("the evaluator ends").expect("the evaluator ends well");
    }

    /// It is gone without a word, as after SIGKILL.
    pub async fn kill(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for RunningEvaluator {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Press {
    /// Asks for an evaluation.
    pub async fn ask(&self, source: &str, attrs: &[&str]) -> i64 {
        let attrs: Vec<String> = attrs.iter().map(|&attr| attr.to_owned()).collect();
        let request = Request { project: "main", source, attrs: &attrs, ..Request::default() };
        evaluations::queue(&self.farm.frontend, &request).await.expect("queue an evaluation")
    }

    /// An evaluation as it is now.
    pub async fn evaluation(&self, id: i64) -> Evaluation {
        evaluations::get(&self.farm.frontend, id).await.expect("an answer").expect("an evaluation")
    }

    /// Waits until an evaluation itself, its builds apart, has ended.
    pub async fn evaluated(&self, id: i64) -> Evaluation {
        crate::eventually("the evaluation ends", || async {
            !matches!(self.evaluation(id).await.stage, Stage::Queued | Stage::Evaluating)
        })
        .await;
        self.evaluation(id).await
    }

    /// The attributes of an evaluation: errors, or none.
    pub async fn attributes(&self, id: i64) -> BTreeMap<String, Option<String>> {
        let attributes =
            evaluations::attributes(&self.farm.frontend, id, "", false, 1000).await.expect("attributes");
        let attributes = attributes.into_iter().map(|attribute| {
            assert!(attribute.build.is_some() != attribute.error.is_some(), "{attribute:?}");
            (attribute.name, attribute.error)
        });
        attributes.collect()
    }
}
