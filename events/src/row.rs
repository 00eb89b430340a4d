//! Maps rows of a statement to structs.

/// Declares a struct that is read from a row by column name, on any database that has the types.
///
/// A raw identifier matches no column: alias the column in the statement. The field
/// `place: u32 as i32` has the database type `i32`; an out-of-range value is a decoding error.
///
/// Replaces sqlx's derive, which compiles a second sqlx for the build machine.
#[macro_export]
macro_rules! row {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $($(#[$about:meta])* $seen:vis $field:ident: $type:ty $(as $stored:ty)?),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        $vis struct $name { $($(#[$about])* $seen $field: $type),+ }

        impl<'r, R: ::sqlx::Row> ::sqlx::FromRow<'r, R> for $name
        where
            &'static str: ::sqlx::ColumnIndex<R>,
            $($crate::row!(@stored $type $(, $stored)?):
                ::sqlx::Decode<'r, R::Database> + ::sqlx::Type<R::Database>,)+
        {
            fn from_row(row: &'r R) -> ::sqlx::Result<Self> {
                Ok(Self { $($field: $crate::row!(@read row, $field $(, $stored)?)),+ })
            }
        }
    };
    (@stored $type:ty) => { $type };
    (@stored $type:ty, $stored:ty) => { $stored };
    (@read $row:ident, $field:ident) => { $row.try_get(stringify!($field))? };
    (@read $row:ident, $field:ident, $stored:ty) => {
        $row.try_get::<$stored, _>(stringify!($field))?
            .try_into()
            .map_err(|error| ::sqlx::Error::ColumnDecode {
                index: stringify!($field).to_owned(),
                source: ::std::boxed::Box::new(error),
            })?
    };
}

#[cfg(test)]
mod tests {
    use sqlx::{Connection, SqliteConnection};

    crate::row! {
        struct Line {
            name: String,
            place: u8 as i32,
            note: Option<String>,
        }
    }

    #[tokio::test]
    async fn a_row_is_read_by_column_names_and_an_out_of_range_value_is_an_error() {
        let mut db = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        let sql = "SELECT NULL AS note, 'x' AS name, 7 AS place";
        let line: Line = sqlx::query_as(sql).fetch_one(&mut db).await.unwrap();
        assert_eq!((line.name.as_str(), line.place, line.note), ("x", 7, None));
        let sql = "SELECT NULL AS note, 'x' AS name, 256 AS place";
        let line = sqlx::query_as::<_, Line>(sql).fetch_one(&mut db).await;
        let error = line.err().expect("256 is no u8").to_string();
        assert!(error.contains("place"), "{error}");
    }
}
