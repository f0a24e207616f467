//! The server of a farm on one machine, which is stopped and started again on what it has.

use std::path::Path;
use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_s3::types::{ChecksumMode, ChecksumType, CompletedMultipartUpload, CompletedPart};
use harmonia_nix::Sha256;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// S3 takes parts from 5 MiB.
const PART: usize = 5 << 20;

struct Running {
    client: Client,
    task: JoinHandle<()>,
}

impl Running {
    async fn on(root: &Path) -> Running {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let root = root.to_owned();
        let task = tokio::spawn(async move {
            harmonia_s3::serve(&root, "key", "secret", listener, std::future::pending()).await.unwrap();
        });
        let config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .http_client(aws_smithy_http_client::Builder::new().build_http())
            .region(Region::new("us-east-1"))
            .endpoint_url(endpoint)
            .force_path_style(true)
            .credentials_provider(Credentials::new("key", "secret", None, None, "test"))
            .build();
        Running { client: Client::from_conf(config), task }
    }

    async fn stop(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

#[tokio::test]
async fn an_upload_in_parts_goes_on_after_a_restart_and_its_checksum_stays() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("cache")).unwrap();
    let parts = [vec![1_u8; PART], vec![2_u8; 1000]];
    let sums: Vec<String> = parts.iter().map(|part| Sha256::of(part).base64()).collect();

    let first = Running::on(root.path()).await;
    let begun = first.client.create_multipart_upload().bucket("cache").key("nar/x").send().await.unwrap();
    let upload = begun.upload_id().unwrap();
    let mut completed = CompletedMultipartUpload::builder();
    for ((part, sum), number) in parts.iter().zip(&sums).zip(1..) {
        let put =
            first.client.upload_part().bucket("cache").key("nar/x").upload_id(upload).part_number(number);
        let put = put.checksum_sha256(sum).body(part.clone().into()).send().await.unwrap();
        let part = CompletedPart::builder().part_number(number).set_e_tag(put.e_tag).checksum_sha256(sum);
        completed = completed.parts(part.build());
    }
    let listed = first.client.list_multipart_uploads().bucket("cache").prefix("nar/").send().await.unwrap();
    assert_eq!(listed.uploads()[0].upload_id(), Some(upload));
    first.stop().await;

    let second = Running::on(root.path()).await;
    let complete = second.client.complete_multipart_upload().bucket("cache").key("nar/x").upload_id(upload);
    complete.multipart_upload(completed.build()).send().await.unwrap();
    second.stop().await;

    let third = Running::on(root.path()).await;
    let head = third.client.head_object().bucket("cache").key("nar/x").checksum_mode(ChecksumMode::Enabled);
    let head = head.send().await.unwrap();
    let both: Vec<u8> = parts.iter().flat_map(|part| Sha256::of(part).0).collect();
    assert_eq!(head.checksum_sha256(), Some(format!("{}-2", Sha256::of(both).base64()).as_str()));
    assert_eq!(head.checksum_type(), Some(&ChecksumType::Composite));
    third.stop().await;
}

/// The server is at it when whoever asked goes away.
#[tokio::test(flavor = "multi_thread")]
async fn a_completion_goes_on_although_nobody_waits_for_it() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("cache")).unwrap();
    let server = Running::on(root.path()).await;
    let begun = server.client.create_multipart_upload().bucket("cache").key("nar/x").send().await.unwrap();
    let upload = begun.upload_id().unwrap();
    let (part, sum) = (vec![7_u8; 4 * PART], Sha256::of(vec![7_u8; 4 * PART]).base64());
    let mut completed = CompletedMultipartUpload::builder();
    for number in 1..=5 {
        let put =
            server.client.upload_part().bucket("cache").key("nar/x").upload_id(upload).part_number(number);
        let put = put.checksum_sha256(&sum).body(part.clone().into()).send().await.unwrap();
        let part = CompletedPart::builder().part_number(number).set_e_tag(put.e_tag).checksum_sha256(&sum);
        completed = completed.parts(part.build());
    }
    let complete = server.client.complete_multipart_upload().bucket("cache").key("nar/x").upload_id(upload);
    let asked = tokio::spawn(complete.multipart_upload(completed.build()).send());
    let marker = root.path().join(format!(".upload-{upload}.json"));
    assert!(marker.exists());
    while marker.exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    asked.abort();
    assert!(asked.await.is_err(), "it was done too soon");
    let head = || {
        let head = server.client.head_object().bucket("cache").key("nar/x");
        head.checksum_mode(ChecksumMode::Enabled).send()
    };
    harmonia_tests::eventually("the object is whole", || async {
        head().await.is_ok_and(|head| head.checksum_sha256().is_some_and(|sum| sum.ends_with("-5")))
    })
    .await;
    server.stop().await;
}

/// Keys of all pages, and prefixes that several have in common.
async fn list(client: &Client, prefix: &str, delimiter: Option<&str>) -> (Vec<String>, Vec<String>) {
    let request =
        client.list_objects_v2().bucket("cache").prefix(prefix).set_delimiter(delimiter.map(Into::into));
    let pages = request.max_keys(2).into_paginator().send().collect::<Result<Vec<_>, _>>().await.unwrap();
    assert!(pages.iter().all(|page| page.contents().len() + page.common_prefixes().len() <= 2));
    let keys = pages.iter().flat_map(|page| page.contents()).filter_map(|object| object.key.clone());
    let common =
        pages.iter().flat_map(|page| page.common_prefixes()).filter_map(|common| common.prefix.clone());
    (keys.collect(), common.collect())
}

#[tokio::test]
async fn a_list_has_every_object_once_and_in_order_whatever_its_pages() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("cache/empty/below")).unwrap();
    let server = Running::on(root.path()).await;
    let keys = ["a.narinfo", "b.narinfo", "log/x", "nar-info", "nar/1.nar", "nar/2.nar", "nar/2/deep", "zz"];
    for key in keys {
        server.client.put_object().bucket("cache").key(key).body(vec![7; 3].into()).send().await.unwrap();
    }
    let expect = |prefix, delimiter, objects: &[&str], common: &[&str]| {
        let wanted: (Vec<String>, Vec<String>) = (
            objects.iter().map(ToString::to_string).collect(),
            common.iter().map(ToString::to_string).collect(),
        );
        let listed = list(&server.client, prefix, delimiter);
        async move { assert_eq!(listed.await, wanted, "{prefix:?} {delimiter:?}") }
    };
    expect("", None, &keys, &[]).await;
    expect("", Some("/"), &["a.narinfo", "b.narinfo", "nar-info", "zz"], &["log/", "nar/"]).await;
    expect("nar/", Some("/"), &["nar/1.nar", "nar/2.nar"], &["nar/2/"]).await;
    expect("nar", None, &["nar-info", "nar/1.nar", "nar/2.nar", "nar/2/deep"], &[]).await;
    expect("none/", None, &[], &[]).await;
    expect("../", None, &[], &[]).await;
    server.stop().await;
}
