//! What we count on in an S3 server, on each of those that the tests use.

use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::presigning::PresigningConfig;
use aws_sdk_s3::types::{
    ChecksumAlgorithm, ChecksumMode, ChecksumType, CompletedMultipartUpload, CompletedPart,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use harmonia_tests::s3::{S3, Server};
use reqwest::StatusCode;
use sha2::{Digest, Sha256};

const KEY: &str = "nar/0c5b8vw40dy178xlpddw65q9gf1h2186jcc3p4swinwggbllv8mk.nar.zst";

fn sha256(bytes: &[u8]) -> String {
    STANDARD.encode(Sha256::digest(bytes))
}

fn http() -> reqwest::Client {
    // Refused from the second time on: another test did it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

/// Sends `body` to a URL that was presigned for `promised`: once only, with its length and checksum.
async fn put_presigned(s3: &S3, promised: &[u8], body: &[u8]) -> StatusCode {
    let put = s3.client().put_object().bucket(&s3.bucket).key(KEY).if_none_match("*");
    let put = put.content_length(promised.len() as i64).checksum_sha256(sha256(promised));
    let presigned =
        put.presigned(PresigningConfig::expires_in(Duration::from_secs(60)).unwrap()).await.unwrap();
    let mut request = http().put(presigned.uri());
    for (name, value) in presigned.headers() {
        request = request.header(name, value);
    }
    request.body(body.to_vec()).send().await.unwrap().status()
}

#[tokio::test]
async fn a_presigned_put_works_once() {
    for server in Server::FIT {
        let s3 = S3::start(server).await;
        assert_eq!(put_presigned(&s3, b"content", b"content").await, StatusCode::OK, "{server:?}");
        assert_eq!(
            put_presigned(&s3, b"other", b"other").await,
            StatusCode::PRECONDITION_FAILED,
            "{server:?}"
        );
        let object = s3.client().get_object().bucket(&s3.bucket).key(KEY).send().await.unwrap();
        assert_eq!(object.body.collect().await.unwrap().to_vec(), b"content", "{server:?}");
    }
}

#[tokio::test]
async fn a_wrong_checksum_is_refused() {
    for server in Server::FIT {
        let s3 = S3::start(server).await;
        let status = put_presigned(&s3, b"content", b"CONTENT").await;
        assert!(status.is_client_error(), "{server:?}: {status}");
    }
}

#[tokio::test]
async fn a_wrong_length_is_refused() {
    for server in Server::FIT {
        let s3 = S3::start(server).await;
        let put = s3.client().put_object().bucket(&s3.bucket).key(KEY).content_length(3);
        let presigned =
            put.presigned(PresigningConfig::expires_in(Duration::from_secs(60)).unwrap()).await.unwrap();
        let status = http().put(presigned.uri()).body("content").send().await.unwrap().status();
        assert!(status.is_client_error(), "{server:?}: {status}");
    }
}

#[tokio::test]
async fn a_head_gives_size_and_checksum_back() {
    for server in Server::FIT {
        let s3 = S3::start(server).await;
        put_presigned(&s3, b"content", b"content").await;
        let head = s3.client().head_object().bucket(&s3.bucket).key(KEY).checksum_mode(ChecksumMode::Enabled);
        let head = head.send().await.unwrap();
        assert_eq!(head.content_length(), Some(7), "{server:?}");
        assert_eq!(head.checksum_sha256(), Some(sha256(b"content").as_str()), "{server:?}");
    }
}

/// The least that a part other than the last may have.
const PART: usize = 5 * 1024 * 1024;

/// Uploads two parts and returns the status of the conditional completion.
async fn put_multipart(client: &Client, bucket: &str, parts: [&[u8]; 2]) -> StatusCode {
    let create = client.create_multipart_upload().bucket(bucket).key(KEY);
    let create =
        create.checksum_algorithm(ChecksumAlgorithm::Sha256).checksum_type(ChecksumType::Composite).send();
    let create = create.await.unwrap();
    let upload = create.upload_id().unwrap();
    let mut completed = CompletedMultipartUpload::builder();
    for (number, bytes) in (1..).zip(parts) {
        let checksum = sha256(bytes);
        let part = client.upload_part().bucket(bucket).key(KEY).upload_id(upload).part_number(number);
        let part = part.checksum_sha256(&checksum).body(bytes.to_vec().into()).send().await.unwrap();
        let part =
            CompletedPart::builder().part_number(number).set_e_tag(part.e_tag).checksum_sha256(checksum);
        completed = completed.parts(part.build());
    }
    let complete = client.complete_multipart_upload().bucket(bucket).key(KEY).upload_id(upload);
    let complete = complete.multipart_upload(completed.build()).if_none_match("*").send().await;
    match complete {
        Ok(_) => StatusCode::OK,
        Err(error) => StatusCode::from_u16(error.raw_response().unwrap().status().as_u16()).unwrap(),
    }
}

#[tokio::test]
async fn a_multipart_upload_completes_once() {
    let first = vec![b'a'; PART];
    for server in Server::FIT {
        let s3 = S3::start(server).await;
        let client = s3.client();
        assert_eq!(put_multipart(&client, &s3.bucket, [&first, b"b"]).await, StatusCode::OK, "{server:?}");
        let again = put_multipart(&client, &s3.bucket, [&first, b"c"]).await;
        assert_eq!(again, StatusCode::PRECONDITION_FAILED, "{server:?}");
    }
}

#[tokio::test]
async fn a_head_gives_the_checksum_of_the_checksums_of_the_parts() {
    let first = vec![b'a'; PART];
    let both = [Sha256::digest(&first), Sha256::digest(b"b")].concat();
    for server in Server::FIT {
        let s3 = S3::start(server).await;
        put_multipart(&s3.client(), &s3.bucket, [&first, b"b"]).await;
        let head = s3.client().head_object().bucket(&s3.bucket).key(KEY).checksum_mode(ChecksumMode::Enabled);
        let head = head.send().await.unwrap();
        assert_eq!(head.checksum_sha256(), Some(format!("{}-2", sha256(&both)).as_str()), "{server:?}");
    }
}

#[tokio::test]
async fn a_part_with_a_wrong_checksum_is_refused() {
    for server in Server::FIT {
        let s3 = S3::start(server).await;
        let client = s3.client();
        let create = client.create_multipart_upload().bucket(&s3.bucket).key(KEY);
        let create = create.checksum_algorithm(ChecksumAlgorithm::Sha256).send().await.unwrap();
        let part = client.upload_part().bucket(&s3.bucket).key(KEY).upload_id(create.upload_id().unwrap());
        let part = part.part_number(1).checksum_sha256(sha256(b"promised")).body(b"sent".to_vec().into());
        let error = part.send().await.expect_err("a wrong checksum");
        assert!(error.raw_response().unwrap().status().is_client_error(), "{server:?}");
    }
}

#[tokio::test]
async fn one_of_many_racing_uploads_wins() {
    let s3 = S3::start(Server::Versitygw).await;
    let contents: Vec<_> = (0..8).map(|number| format!("content {number}")).collect();
    let puts = contents.iter().map(|content| put_presigned(&s3, content.as_bytes(), content.as_bytes()));
    let statuses = futures::future::join_all(puts).await;
    assert_eq!(statuses.iter().filter(|status| status.is_success()).count(), 1, "{statuses:?}");
}

#[tokio::test]
async fn only_objects_of_a_public_bucket_can_be_read_by_everyone() {
    for server in Server::FIT {
        let private = S3::start(server).await;
        let public = S3::start_public(server).await;
        for s3 in [&private, &public] {
            put_presigned(s3, b"content", b"content").await;
        }
        let get = async |url: String| http().get(url).send().await.unwrap().status();
        assert_eq!(get(format!("{}/{KEY}", private.url())).await, StatusCode::FORBIDDEN, "{server:?}");
        assert_eq!(get(format!("{}/{KEY}", public.url())).await, StatusCode::OK, "{server:?}");
        let put = http().put(format!("{}/forged", public.url())).body("forged").send().await.unwrap();
        assert_eq!(put.status(), StatusCode::FORBIDDEN, "{server:?}");
    }
}

#[tokio::test]
async fn an_unfit_server_overwrites_and_believes() {
    let s3 = S3::start(Server::Unfit).await;
    assert_eq!(put_presigned(&s3, b"content", b"content").await, StatusCode::OK);
    assert_eq!(put_presigned(&s3, b"other", b"OTHER").await, StatusCode::OK);
    let object = s3.client().get_object().bucket(&s3.bucket).key(KEY).send().await.unwrap();
    assert_eq!(object.body.collect().await.unwrap().to_vec(), b"OTHER");
}
